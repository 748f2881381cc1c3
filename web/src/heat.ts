// Layers across, heads down: for the selected token, how much each head took from its largest source
// other than the first token, or how widely it looked. A cell chooses its head.

import { isMissing, type Data, type TokenRecord } from "./data";
import { byId, clamp, make, scale } from "./dom";
import { NAT, ONE, percent, shade } from "./shares";
import type { State } from "./state";

interface Cell {
  button: HTMLButtonElement;
  layer: number;
  head: number;
  /** What the tooltip says. */
  said: string;
  source: number | null;
}

export class HeatMap {
  private readonly cells: Cell[] = [];
  private readonly grid = byId("grid");
  private reachable = 0;
  private chosen: HTMLElement | null = null;
  private drawn: [State, TokenRecord] | null = null;

  constructor(
    private readonly data: Data,
    private readonly choose: (layer: number, head: number) => void,
  ) {
    this.fill();
    this.grid.addEventListener("click", (event) => {
      const cell = this.cellAt(event.target);
      if (cell !== null) this.choose(cell.layer, cell.head);
    });
    this.grid.addEventListener("keydown", (event) => this.move(event));
    byId("heat-measure").addEventListener("change", () => this.drawn !== null && this.draw(...this.drawn));
  }

  private fill(): void {
    const { layers, heads } = this.data;
    this.grid.style.setProperty("--columns", String(layers.length));
    this.grid.classList.toggle("dense", layers.length > 48 || heads > 40);
    const every = layers.length > 48 ? 10 : layers.length > 12 ? 5 : 1;
    const all: HTMLElement[] = [make("span", "axis corner", "layer")];
    layers.forEach((layer, i) => {
      const told = i % every === 0 || layers.length <= 12;
      all.push(make("span", "axis", told ? String(layer) : ""));
    });
    const rowEvery = heads > 16 ? 4 : 1;
    for (let head = 0; head < heads; head++) {
      all.push(make("span", "axis side", head === 0 ? "head 0" : head % rowEvery === 0 ? String(head) : ""));
      for (const layer of layers) {
        const button = make("button", "cell");
        button.type = "button";
        button.tabIndex = this.cells.length === 0 ? 0 : -1;
        button.dataset["cell"] = String(this.cells.length);
        this.cells.push({ button, layer, head, said: "", source: null });
        all.push(button);
      }
    }
    this.grid.replaceChildren(...all);
  }

  cellAt(target: EventTarget | null): Cell | null {
    const button = target instanceof Element ? target.closest<HTMLElement>("[data-cell]") : null;
    return button === null ? null : (this.cells[Number(button.dataset["cell"])] ?? null);
  }

  private move(event: KeyboardEvent): void {
    const columns = this.data.layers.length;
    const steps: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = this.reachable + step;
    if (next < 0 || next >= this.cells.length) return;
    this.reach(next);
    this.cells[next]!.button.focus();
  }

  private reach(index: number): void {
    this.cells[this.reachable]!.button.tabIndex = -1;
    this.reachable = clamp(index, 0, this.cells.length - 1);
    this.cells[this.reachable]!.button.tabIndex = 0;
  }

  draw(state: State, record: TokenRecord): void {
    this.drawn = [state, record];
    const entropies = document.querySelector<HTMLInputElement>("input[name=heat]:checked")?.value === "entropy";
    if (entropies) this.drawEntropy(state, record);
    else this.drawLargest(record);
    this.chosen?.removeAttribute("aria-pressed");
    this.chosen = null;
    if (state.layer === null || state.head === null) return;
    const index = state.head * this.data.layers.length + this.data.layers.indexOf(state.layer);
    this.chosen = this.cells[index]!.button;
    this.chosen.setAttribute("aria-pressed", "true");
    this.reach(index);
  }

  private drawLargest(record: TokenRecord): void {
    const keys = record.get("head.keys");
    const weights = record.get("head.weights");
    const columns = this.data.layers.length;
    const width = keys.length / this.cells.length;
    const found = this.cells.map((_, index) => {
      const start = ((index % columns) * this.data.heads + Math.floor(index / columns)) * width;
      let [weight, source] = [-1, -1];
      for (let i = start; i < start + width; i++) {
        if (keys[i] === 0 || isMissing(keys[i]!, keys) || weights[i]! <= weight) continue;
        [weight, source] = [weights[i]!, keys[i]!];
      }
      return { weight, source };
    });
    const largest = Math.max(0, ...found.map(({ weight }) => weight));
    found.forEach(({ weight, source }, index) => {
      const cell = this.cells[index]!;
      cell.source = source < 0 ? null : source;
      const said = source < 0 ? "nothing but the first token" : percent(Math.round((weight * 1000) / ONE));
      this.set(cell, weight < 0 ? 0 : shade(weight, largest), said);
    });
    const tenths = Math.round((largest * 1000) / ONE);
    byId("heat-legend").replaceChildren(
      scale(["0", percent(Math.round(tenths / 4)), percent(tenths)]),
      make("span", "", "a head\u2019s largest share on a token other than the first"),
    );
  }

  private drawEntropy(state: State, record: TokenRecord): void {
    const entropy = record.get("head.entropy");
    const columns = this.data.layers.length;
    const most = Math.log(state.token + 1);
    this.cells.forEach((cell, index) => {
      const nats = entropy[(index % columns) * this.data.heads + Math.floor(index / columns)]! / NAT;
      cell.source = null;
      this.set(cell, most > 0 ? clamp(nats / most, 0, 1) : 0, `${nats.toFixed(2)} nats`);
    });
    byId("heat-legend").replaceChildren(
      scale(["0", (most / 2).toFixed(1), `${most.toFixed(1)} nats`]),
      make("span", "", "from one token alone to all of them evenly"),
    );
  }

  private set(cell: Cell, u: number, said: string): void {
    cell.button.style.setProperty("--u", u.toFixed(3));
    cell.said = said;
    cell.button.setAttribute("aria-label", `Layer ${cell.layer}, head ${cell.head}: ${said}`);
  }
}
