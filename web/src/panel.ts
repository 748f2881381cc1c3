// Beside the text: the selected token, where its 100 % lie, and its sources in order.

import type { Data } from "./data";
import { byId, make } from "./dom";
import { spaced, split } from "./pieces";
import { percent, type Source, type Sources } from "./shares";
import type { State } from "./state";
import type { TokenText } from "./text";

const FEW = 8;

export class Panel {
  private all = false;
  private drawn: [State, Sources] | null = null;

  constructor(
    private readonly data: Data,
    private readonly text: TokenText,
    private readonly follow: (token: number) => void,
    private readonly point: (token: number | null) => void,
  ) {
    const rows = byId("rows");
    const tokenOf = (event: Event): number | null => {
      const button = event.target instanceof Element ? event.target.closest<HTMLElement>("[data-token]") : null;
      return button === null ? null : Number(button.dataset["token"]);
    };
    rows.addEventListener("click", (event) => {
      const token = tokenOf(event);
      if (token !== null) this.follow(token);
      else if (event.target instanceof Element && event.target.closest(".more") !== null) this.toggleAll();
    });
    for (const kind of ["pointerover", "focusin"]) rows.addEventListener(kind, (event) => this.point(tokenOf(event)));
    for (const kind of ["pointerleave", "focusout"]) rows.addEventListener(kind, () => this.point(null));
  }

  private toggleAll(): void {
    this.all = !this.all;
    if (this.drawn === null) return;
    this.drawRows(...this.drawn);
    byId("rows").querySelector<HTMLElement>(".more")?.focus();
  }

  draw(state: State, sources: Sources): void {
    this.drawn = [state, sources];
    byId("position").textContent = `Token ${state.token}`;
    byId("view").textContent = viewName(state);
    byId("token").textContent = spaced(this.text.shown[state.token]!);
    this.drawWhole(state, sources);
    this.drawRows(state, sources);
    const entropy = byId("entropy");
    entropy.hidden = sources.entropy === null;
    if (sources.entropy !== null) {
      const spread = Math.exp(sources.entropy).toFixed(1);
      entropy.textContent = `Entropy ${sources.entropy.toFixed(2)} nats: as if spread evenly over ${spread} tokens.`;
    }
  }

  /** One bar for the whole 100 %: first token, the token itself, the other sources, what is not listed. */
  private drawWhole(state: State, sources: Sources): void {
    const tenthsAt = (token: number): number => sources.listed.find((source) => source.token === token)?.tenths ?? 0;
    const first = tenthsAt(0);
    const own = state.token === 0 ? 0 : tenthsAt(state.token);
    const other = 1000 - first - own - sources.restTenths;
    const parts: [string, string, number][] = [
      ["first", state.token === 0 ? "first token, itself" : "first token", first],
      ["own", "itself", own],
      ["other", "other sources", other],
      ["rest", "not listed", sources.restTenths],
    ];
    const shown = parts.filter(([kind, , tenths]) => tenths > 0 || kind === "rest");
    byId("whole").replaceChildren(
      ...shown.map(([kind, , tenths]) => {
        const part = make("span", kind);
        part.style.flexGrow = String(tenths);
        return part;
      }),
    );
    byId("parts").replaceChildren(
      ...shown.map(([kind, name, tenths]) => make("li", kind, `${name} `, make("b", "", percent(tenths)))),
    );
    if (first === 0 && sources.firstTenths !== null) {
      byId("parts").append(make("li", "", `of it the first token ${percent(sources.firstTenths)}`));
    }
  }

  private drawRows(state: State, sources: Sources): void {
    const { listed, restTenths } = sources;
    const cut = this.all || listed.length <= FEW + 1 ? listed.length : FEW;
    const scaled = listed.filter((source) => source.token !== 0 || !state.leaveFirst);
    const largest = scaled[0]?.weight ?? 0;
    const rows = listed.slice(0, cut).map((source) => this.row(state, source, largest));
    const hidden = listed.slice(cut);
    if (hidden.length > 0 || (this.all && listed.length > FEW + 1)) rows.push(this.more(hidden));
    const rest = make("li", "row rest", make("span", "share", percent(restTenths)), make("span", "words", "not listed"));
    byId("rows").replaceChildren(...rows, rest);
  }

  private row(state: State, source: Source, largest: number): HTMLElement {
    const [lead, core] = split(this.text.shown[source.token]!);
    const [before, after] = this.text.around(source.token, 14);
    const words = make(
      "span",
      "words",
      make("span", "before", ...this.text.excerpt(before), lead),
      make("bdi", "core", core),
      make("span", "after", ...this.text.excerpt(after)),
    );
    const note = source.token === 0 ? "first token" : source.token === state.token ? "itself" : "";
    const bar = make("span", "bar");
    const leftOut = source.token === 0 && state.leaveFirst;
    bar.style.setProperty("--w", String(leftOut ? 1 : source.weight / Math.max(1, largest)));
    const share = make("span", "share", percent(source.tenths));
    const place = make("span", "place", note === "" ? `${source.token}` : make("em", "", note), note === "" ? "" : ` ${source.token}`);
    const button = make("button", leftOut ? "left-out" : "", share, words, place, bar);
    button.type = "button";
    button.dataset["token"] = String(source.token);
    const name = `${percent(source.tenths)} from token ${source.token}${note === "" ? "" : `, ${note}`}: ${core}`;
    button.setAttribute("aria-label", name);
    return make("li", "row", button);
  }

  private more(hidden: Source[]): HTMLElement {
    const tenths = hidden.reduce((sum, source) => sum + source.tenths, 0);
    const label = this.all ? "show fewer" : `${hidden.length} more sources`;
    const share = make("span", "share", this.all ? "" : percent(tenths));
    const button = make("button", "more", share, make("span", "words", label));
    button.type = "button";
    button.setAttribute("aria-expanded", String(this.all));
    return make("li", "row", button);
  }

  /** What a screen reader hears after a choice. */
  summary(state: State, sources: Sources): string {
    const top = sources.listed.find((source) => source.token !== 0) ?? sources.listed[0];
    const from = top === undefined ? "no source listed" : `${percent(top.tenths)} from ${this.text.shown[top.token]}`;
    return `Token ${state.token} of ${this.data.texts.length}, ${this.text.shown[state.token]}: ${from}.`;
  }
}

export function viewName(state: State): string {
  if (state.layer === null) {
    return state.measure === "weight"
      ? "mean weight, all layers and heads"
      : "share of what was written, all layers and heads";
  }
  if (state.head === null) return `layer ${state.layer}, mean weight of its heads`;
  return `layer ${state.layer}, head ${state.head}`;
}
