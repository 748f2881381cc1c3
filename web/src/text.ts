// The text as tokens: one isolated inline element each, the selected one outlined, its sources shaded.

import type { Data } from "./data";
import { clamp, make } from "./dom";
import { type Direction, directionOf, mainDirection, readable, runsAgainst, split } from "./pieces";
import { shade, type Source } from "./shares";

export class TokenText {
  readonly shown: string[];
  private direction: Direction = "ltr";
  private readonly elements: HTMLElement[] = [];
  private shaded: HTMLElement[] = [];
  private ticks: HTMLElement[] = [];
  private selected: HTMLElement | null = null;
  private pointed: HTMLElement | null = null;

  constructor(
    data: Data,
    private readonly root: HTMLElement,
    private readonly scroller: HTMLElement,
    private readonly rail: HTMLElement,
    private readonly frame: HTMLElement,
  ) {
    this.shown = data.texts.map((text, i) => readable(text, data.ids[i] ?? 0));
    if (data.texts.length <= 120) root.classList.add("short");
    this.fill();
    scroller.addEventListener("scroll", () => this.placeFrame(), { passive: true });
    new ResizeObserver(() => this.placeTicks()).observe(scroller);
    rail.addEventListener("pointerdown", (event) => this.scrollTo(event));
    rail.addEventListener("pointermove", (event) => event.buttons === 1 && this.scrollTo(event));
  }

  /** A new paragraph begins after every token that ends a line. */
  private fill(): void {
    const directions = this.shown.map(directionOf);
    const main = mainDirection(directions);
    const runs = runsAgainst(main, this.shown, directions);
    this.direction = main;
    this.root.dir = main;
    const all = document.createDocumentFragment();
    let paragraph = make("div", "p");
    let place: HTMLElement = paragraph;
    let runEnd = -1;
    this.shown.forEach((shown, i) => {
      const [lead, core] = split(shown);
      if (i === runEnd) place = paragraph;
      if (runs.has(i)) {
        // The space before a run belongs to the line, not to the run.
        if (lead !== "") paragraph.append(lead);
        runEnd = runs.get(i)!;
        place = this.run();
        paragraph.append(place);
      } else if (lead !== "") place.append(lead);
      place.append(this.box(i, core));
      if (!core.endsWith("\u23ce")) return;
      if (core.endsWith("\u23ce\u23ce")) paragraph.classList.add("gap");
      all.append(paragraph);
      paragraph = make("div", "p");
      place = paragraph;
    });
    all.append(paragraph);
    this.root.append(all);
  }

  /** A place for tokens against the main direction. */
  private run(): HTMLElement {
    const run = make("span", "run");
    run.dir = this.direction === "ltr" ? "rtl" : "ltr";
    return run;
  }

  /** A few tokens as they stand in the text, but only to be read. */
  excerpt(shown: string[]): (Node | string)[] {
    const runs = runsAgainst(this.direction, shown, shown.map(directionOf));
    const all: (Node | string)[] = [];
    let run: HTMLElement | null = null;
    let runEnd = -1;
    shown.forEach((piece, i) => {
      const [lead, core] = split(piece);
      const box = make("bdi", "", core);
      if (i === runEnd) run = null;
      if (runs.has(i)) {
        runEnd = runs.get(i)!;
        run = this.run();
        run.append(box);
        all.push(lead, run);
      } else if (run !== null) run.append(lead, box);
      else all.push(lead, box);
    });
    return all;
  }

  private box(token: number, core: string): HTMLElement {
    const element = make("bdi", /^[\u2400-\u2421\u23ce\u2192\u21e5\u00b7]+$/.test(core) ? "t sign" : "t");
    element.textContent = core.replace(/\u23ce(?![\u23ce]|$)/g, "\u23ce\n");
    element.id = `t${token}`;
    element.setAttribute("role", "option");
    element.setAttribute("aria-selected", "false");
    this.elements.push(element);
    return element;
  }

  get length(): number {
    return this.elements.length;
  }

  element(token: number): HTMLElement | undefined {
    return this.elements[token];
  }

  /** The token that a node lies in, or null. */
  tokenAt(target: EventTarget | null): number | null {
    const element = target instanceof Element ? target.closest(".t") : null;
    return element !== null && this.root.contains(element) ? Number(element.id.slice(1)) : null;
  }

  /** The tokens around one, whole, as many as fit into `reach` characters before it and three times that after. */
  around(token: number, reach: number): [string[], string[]] {
    const before: string[] = [];
    let room = reach - this.shown[token]!.search(/[^ ]|$/);
    for (let i = token - 1; i >= 0 && room >= this.shown[i]!.length; i--) {
      before.unshift(this.shown[i]!);
      room -= this.shown[i]!.length;
    }
    if (before.length > 0) before[0] = before[0]!.trimStart();
    const after: string[] = [];
    room = 3 * reach;
    for (let i = token + 1; i < this.length && room > 0; i++) {
      after.push(this.shown[i]!.slice(0, room));
      room -= this.shown[i]!.length;
    }
    return [before, after];
  }

  select(token: number): void {
    if (this.selected !== null) {
      this.selected.setAttribute("aria-selected", "false");
      this.markWay(this.selected, false);
    }
    const element = this.elements[token]!;
    element.setAttribute("aria-selected", "true");
    this.markWay(element, true);
    this.root.setAttribute("aria-activedescendant", element.id);
    this.selected = element;
  }

  /** What lies around the selected token is marked, so that all that follows it can be dimmed by style alone. */
  private markWay(element: HTMLElement, here: boolean): void {
    for (let around = element.parentElement; around !== null && around !== this.root; around = around.parentElement) {
      around.classList.toggle("here", here);
    }
  }

  /** Shades the sources relative to `largest`; the first token gets a dashed outline when it is left out. */
  paint(sources: Source[], largest: number, leaveFirst: boolean): void {
    for (const element of this.shaded) {
      element.classList.remove("s", "left-out");
      element.style.removeProperty("--u");
    }
    this.shaded = [];
    for (const source of sources) {
      const element = this.elements[source.token];
      if (element === undefined) continue;
      if (source.token === 0 && leaveFirst) element.classList.add("left-out");
      else {
        element.classList.add("s");
        element.style.setProperty("--u", shade(source.weight, largest).toFixed(4));
      }
      this.shaded.push(element);
    }
    this.placeTicks();
  }

  point(token: number | null): void {
    this.pointed?.classList.remove("hot");
    this.pointed = token === null ? null : (this.elements[token] ?? null);
    this.pointed?.classList.add("hot");
  }

  /** Brings a token into the middle of the pane when it is out of sight. */
  reveal(token: number): void {
    const element = this.elements[token];
    if (element === undefined || this.scroller.scrollHeight <= this.scroller.clientHeight) return;
    const pane = this.scroller.getBoundingClientRect();
    const box = element.getBoundingClientRect();
    if (box.top >= pane.top + 24 && box.bottom <= pane.bottom - 24) return;
    this.scroller.scrollTop += box.top - pane.top - pane.height / 2;
  }

  /** The token nearest above (-1) or below (1) in the neighbouring line. */
  inNextLine(token: number, step: -1 | 1): number {
    const start = this.elements[token]!.getBoundingClientRect();
    const middle = (box: DOMRect): number => (box.left + box.right) / 2;
    let best = token;
    let distance = Infinity;
    let line: number | null = null;
    for (let i = token + step; i >= 0 && i < this.length; i += step) {
      const box = this.elements[i]!.getBoundingClientRect();
      if (Math.abs(box.top - start.top) < start.height / 2) continue;
      line ??= box.top;
      if (Math.abs(box.top - line) >= start.height / 2) break;
      const away = Math.abs(middle(box) - middle(start));
      if (away < distance) [best, distance] = [i, away];
    }
    return best;
  }

  /** Marks beside the text where the selected token and its sources lie in a text that is too long to see. */
  private placeTicks(): void {
    const whole = this.scroller.scrollHeight;
    const scrolls = whole > this.scroller.clientHeight + 1;
    this.rail.classList.toggle("idle", !scrolls);
    this.ticks.forEach((tick) => tick.remove());
    this.ticks = [];
    if (!scrolls || this.selected === null) return;
    const top = this.scroller.getBoundingClientRect().top - this.scroller.scrollTop;
    const add = (element: HTMLElement, className: string): void => {
      const box = element.getBoundingClientRect();
      const tick = make("i", className);
      tick.style.top = `${((box.top + box.height / 2 - top) / whole) * 100}%`;
      tick.style.setProperty("--u", element.style.getPropertyValue("--u"));
      this.ticks.push(tick);
    };
    for (const element of [...this.shaded].reverse()) if (element.classList.contains("s")) add(element, "tick");
    add(this.selected, "tick me");
    this.rail.append(...this.ticks);
    this.placeFrame();
  }

  private placeFrame(): void {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.frame.style.top = `${(scrollTop / scrollHeight) * 100}%`;
    this.frame.style.height = `${(clientHeight / scrollHeight) * 100}%`;
  }

  private scrollTo(event: PointerEvent): void {
    const box = this.rail.getBoundingClientRect();
    const part = clamp((event.clientY - box.top) / box.height, 0, 1);
    this.scroller.scrollTop = part * this.scroller.scrollHeight - this.scroller.clientHeight / 2;
  }
}
