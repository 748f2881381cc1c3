// What is shown, and how it stands in the address: #token=5&layer=3&head=2&measure=written&first=shaded

import type { Data } from "./data";

export type Measure = "weight" | "written";

export interface State {
  token: number;
  /** A layer's number (not its place in the list), or null for all. */
  layer: number | null;
  head: number | null;
  measure: Measure;
  /** Whether the first token is left out of the shading. */
  leaveFirst: boolean;
}

function whole(text: string | null): number | null {
  return text !== null && /^\d{1,9}$/.test(text) ? Number(text) : null;
}

/** The state that the address asks for; whatever it asks for in vain is as if it were not there. */
export function readState(hash: string, data: Data, hasLayers: boolean): State {
  const wanted = new URLSearchParams(hash.replace(/^#/, ""));
  const token = whole(wanted.get("token"));
  const layer = whole(wanted.get("layer"));
  const head = whole(wanted.get("head"));
  return normal(
    {
      token: token !== null && token < data.texts.length ? token : data.focus,
      layer: layer !== null && data.layers.includes(layer) ? layer : null,
      head: head !== null && head < data.heads ? head : null,
      measure: wanted.get("measure") === "written" ? "written" : "weight",
      leaveFirst: wanted.get("first") !== "shaded",
    },
    hasLayers,
  );
}

/** A head without its layer means nothing; a layer without a head needs the layer's means. */
export function normal(state: State, hasLayers: boolean): State {
  if (state.layer === null) return { ...state, head: null };
  return { ...state, head: state.head ?? (hasLayers ? null : 0) };
}

export function writeState(state: State): string {
  const parts = [`token=${state.token}`];
  if (state.layer !== null) parts.push(`layer=${state.layer}`);
  if (state.head !== null) parts.push(`head=${state.head}`);
  if (state.measure === "written") parts.push("measure=written");
  if (!state.leaveFirst) parts.push("first=shaded");
  return `#${parts.join("&")}`;
}
