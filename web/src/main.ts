// The page: one state (also in the address), one way through which it changes, one function that draws it.

import { Records, readData, type TokenRecord } from "./data";
import { byId, clamp, make, scale } from "./dom";
import { Finder } from "./find";
import { HeatMap } from "./heat";
import { Panel, viewName } from "./panel";
import { spaced } from "./pieces";
import { ONE, percent, sourcesOf, type Sources } from "./shares";
import { normal, readState, writeState, type Measure, type State } from "./state";
import { TokenText } from "./text";

const data = readData();
const records = new Records(data);
const hasLayers = records.has("layer.keys");
const text = new TokenText(data, byId("text"), byId("scroll"), byId("rail"), byId("frame"));
const finder = new Finder(text.shown);
const panel = new Panel(data, text, (token) => change({ token }, true), point);
const heat = new HeatMap(data, (layer, head) => {
  const again = state.layer === layer && state.head === head;
  change(again ? { layer: null, head: null } : { layer, head });
});

const layerChoice = byId<HTMLSelectElement>("layer");
const headChoice = byId<HTMLSelectElement>("head");
const firstChoice = byId<HTMLInputElement>("first");
const measureChoice = byId<HTMLFieldSetElement>("measure");
const findBox = byId<HTMLInputElement>("find");
const tip = byId("tip");

let state: State = readState(location.hash, data, hasLayers);
let record: TokenRecord | null = null;
let recordOf = -1;
let sources: Sources | null = null;
let addressTimer = 0;
let ready = false;

function change(part: Partial<State>, follow = false): void {
  state = normal({ ...state, ...part }, hasLayers);
  // Following a source is a step that Back undoes; the rest is written a little later, and once.
  window.clearTimeout(addressTimer);
  if (follow) history.pushState(null, "", writeState(state));
  else addressTimer = window.setTimeout(() => history.replaceState(null, "", writeState(state)), 150);
  draw();
}

function draw(): void {
  if (!ready) return;
  if (record === null || recordOf !== state.token) {
    record = records.at(state.token);
    recordOf = state.token;
  }
  sources = sourcesOf(record, state, data.layers);
  drawControls();
  hideTip();
  text.select(state.token);
  const scaled = sources.listed.filter((source) => source.token !== 0 || !state.leaveFirst);
  text.paint(sources.listed, scaled[0]?.weight ?? 0, state.leaveFirst);
  text.reveal(state.token);
  panel.draw(state, sources);
  heat.draw(state, record);
  drawLegend(sources, (scaled[0]?.weight ?? 0) / ONE);
  byId("said").textContent = panel.summary(state, sources);
}

function drawControls(): void {
  layerChoice.value = state.layer === null ? "all" : String(state.layer);
  headChoice.value = state.head === null ? "all" : String(state.head);
  headChoice.disabled = state.layer === null;
  byId("head-hint").hidden = state.layer !== null;
  headChoice.title = state.layer === null ? "Heads belong to a layer: choose a layer first." : "";
  const allHeads = headChoice.options[0];
  if (allHeads !== undefined) allHeads.disabled = state.layer !== null && !hasLayers;
  measureChoice.disabled = state.layer !== null;
  byId("measure-hint").hidden = state.layer === null;
  const measure: Measure = state.layer === null ? state.measure : "weight";
  const radio = measureChoice.querySelector<HTMLInputElement>(`input[value=${measure}]`);
  if (radio !== null) radio.checked = true;
  firstChoice.checked = state.leaveFirst;
}

function drawLegend(now: Sources, largest: number): void {
  const tenths = Math.round(largest * 1000);
  const parts: HTMLElement[] = [];
  if (largest > 0) parts.push(make("span", "", "Share drawn"), scale(["0", percent(Math.round(tenths / 4)), percent(tenths)]));
  else parts.push(make("span", "", "No source to shade but the first token"));
  if (state.leaveFirst && now.firstTenths !== null) {
    parts.push(make("span", "key left-out", make("i"), `first token, left out: ${percent(now.firstTenths)}`));
  }
  if (state.token + 1 < text.length) parts.push(make("span", "key future", make("i", "", "abc"), "later: not visible to it"));
  byId("legend").replaceChildren(...parts);
}

// --- pointing -------------------------------------------------------------------------------------------

function point(token: number | null): void {
  text.point(token);
}

function showTip(target: Element, ...lines: (Node | string)[]): void {
  tip.replaceChildren(...lines.map((line) => make("div", "", line)));
  tip.hidden = false;
  const box = target.getClientRects()[0] ?? target.getBoundingClientRect();
  const own = tip.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  const above = box.top - own.height - 8;
  tip.style.left = `${clamp(box.left + box.width / 2 - own.width / 2, 8, Math.max(8, room - own.width - 8))}px`;
  tip.style.top = `${above >= 8 ? above : box.bottom + 8}px`;
}

function hideTip(): void {
  tip.hidden = true;
}

function named(token: number): HTMLElement {
  return make("b", "", make("bdi", "", spaced(text.shown[token]!)));
}

function shareLine(token: number): string {
  if (sources === null) return "";
  if (token > state.token) return `comes after token ${state.token}: not visible to it`;
  const source = sources.listed.find((one) => one.token === token);
  const own = token === state.token ? "its own share: " : "";
  if (source !== undefined) return `${own}${percent(source.tenths)} (${viewName(state)})`;
  if (token === 0 && sources.firstTenths !== null) return `${percent(sources.firstTenths)}, within \u201cnot listed\u201d`;
  return "not among the listed sources";
}

function tellToken(token: number): void {
  const element = text.element(token);
  if (element === undefined) return;
  const name = make("span", "", named(token), ` token ${token}, id ${data.ids[token]}`);
  showTip(element, name, shareLine(token));
}

byId("text").addEventListener("pointerover", (event) => {
  const token = event.pointerType === "touch" ? null : text.tokenAt(event.target);
  if (token === null) hideTip();
  else tellToken(token);
});
byId("text").addEventListener("pointerleave", hideTip);
byId("scroll").addEventListener("scroll", hideTip, { passive: true });

byId("grid").addEventListener("pointerover", (event) => {
  const cell = heat.cellAt(event.target);
  if (cell === null) return hideTip();
  const where = make("b", "", `layer ${cell.layer}, head ${cell.head}`);
  const on = cell.source === null ? cell.said : make("span", "", `${cell.said} on `, named(cell.source), ` (token ${cell.source})`);
  showTip(cell.button, where, on);
});
byId("grid").addEventListener("pointerleave", hideTip);

// --- choosing -------------------------------------------------------------------------------------------

byId("text").addEventListener("click", (event) => {
  const token = text.tokenAt(event.target);
  if (token !== null) change({ token });
});

/** The token that an arrow key leads to, or null for any other key. */
function tokenAfter(key: string): number | null {
  const ahead = byId("text").dir === "rtl" ? -1 : 1;
  if (key === "ArrowRight") return state.token + ahead;
  if (key === "ArrowLeft") return state.token - ahead;
  if (key === "ArrowDown") return text.inNextLine(state.token, 1);
  if (key === "ArrowUp") return text.inNextLine(state.token, -1);
  if (key === "Home") return 0;
  if (key === "End") return text.length - 1;
  return null;
}

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target === findBox) return;
  if (event.key === "Escape") hideTip();
  if (event.key === "/") {
    event.preventDefault();
    findBox.focus();
    findBox.select();
  }
  // The arrow keys are the text's, also while nothing else has been chosen.
  if (event.target !== document.body && event.target !== byId("text")) return;
  const token = tokenAfter(event.key);
  if (token === null) return;
  event.preventDefault();
  if (token !== state.token) change({ token: clamp(token, 0, text.length - 1) });
});

layerChoice.addEventListener("change", () => {
  change({ layer: layerChoice.value === "all" ? null : Number(layerChoice.value) });
});
headChoice.addEventListener("change", () => {
  change({ head: headChoice.value === "all" ? null : Number(headChoice.value) });
});
firstChoice.addEventListener("change", () => change({ leaveFirst: firstChoice.checked }));
measureChoice.addEventListener("change", () => {
  const chosen = measureChoice.querySelector<HTMLInputElement>("input:checked");
  change({ measure: chosen?.value === "written" ? "written" : "weight" });
});

// --- finding --------------------------------------------------------------------------------------------

function find(step: -1 | 0 | 1): void {
  const found = finder.find(findBox.value);
  const wanted = findBox.value.trim() !== "";
  byId<HTMLButtonElement>("previous").disabled = byId<HTMLButtonElement>("next").disabled = found.length === 0;
  if (found.length === 0) {
    byId("found").textContent = wanted ? "none" : "";
    return;
  }
  let place = found.indexOf(state.token);
  if (place < 0) {
    const after = found.findIndex((token) => token > state.token);
    place = after < 0 ? 0 : after;
    if (step < 0) place = (place - 1 + found.length) % found.length;
  } else place = (place + step + found.length) % found.length;
  byId("found").textContent = `${place + 1} of ${found.length}`;
  change({ token: found[place]! });
}

findBox.addEventListener("input", () => find(0));
findBox.addEventListener("keydown", (event) => {
  if (event.key === "Enter") find(event.shiftKey ? -1 : 1);
});
byId("next").addEventListener("click", () => find(1));
byId("previous").addEventListener("click", () => find(-1));
for (const form of ["controls", "finder"]) byId(form).addEventListener("submit", (event) => event.preventDefault());

// --- starting -------------------------------------------------------------------------------------------

function fillChoices(): void {
  layerChoice.append(new Option("All", "all"), ...data.layers.map((layer) => new Option(String(layer), String(layer))));
  headChoice.append(new Option("All", "all"));
  for (let head = 0; head < data.heads; head++) headChoice.append(new Option(String(head), String(head)));
  byId("title").textContent = data.title;
  byId("model").textContent = data.model;
  byId("count").textContent = `${data.texts.length.toLocaleString("en")} tokens`;
  const kept = [`${records.width("all.weight.keys")} of all layers and heads`];
  if (hasLayers) kept.push(`${records.width("layer.keys")} of a layer`);
  kept.push(`${records.width("head.keys")} of a head`);
  byId("kept").textContent = ` (at most ${kept.join(", ")})`;
}

function start(): void {
  addEventListener("hashchange", () => {
    state = readState(location.hash, data, hasLayers);
    draw();
  });
  ready = true;
  draw();
  document.documentElement.dataset["ready"] = "true";
}

fillChoices();
find(0);
// The records stand after this script, so that the text is there to be read while they arrive.
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
else start();
