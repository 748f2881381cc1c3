// Small helpers. Text from the data enters the document as text nodes only.

export function byId<E extends HTMLElement = HTMLElement>(id: string): E {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`no element #${id}`);
  return element as E;
}

export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  className = "",
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  if (className !== "") element.className = className;
  element.append(...children);
  return element;
}

/** The bar of colours and the shares that its ends and its middle stand for. */
export function scale(labels: [string, string, string]): HTMLElement {
  const ticks = make("span", "ticks", ...labels.map((label) => make("span", "", label)));
  return make("span", "scale", make("span", "ramp"), ticks);
}

export function clamp(value: number, low: number, high: number): number {
  return Math.min(high, Math.max(low, value));
}
