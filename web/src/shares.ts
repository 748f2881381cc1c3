// From integers to the figures on the page: one row of sources whose figures add up to 100.0 %.

import { isMissing, type TokenRecord } from "./data";
import type { State } from "./state";

export const ONE = 65535;
export const NAT = 4096;

export interface Source {
  token: number;
  /** In 1/65535; decides shade and bar. */
  weight: number;
  /** In tenths of a per cent; the figure that is shown. */
  tenths: number;
}

export interface Sources {
  /** Heaviest first. */
  listed: Source[];
  restTenths: number;
  /** The first token's share in tenths, or null when it is not listed and nothing else tells it. */
  firstTenths: number | null;
  /** In nats; for a single head. */
  entropy: number | null;
}

/** Splits 1000 tenths over the weights, each rounded up or down (largest remainders go up). */
export function tenthsOf(weights: number[]): number[] {
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  if (total === 0) return weights.map(() => 0);
  const exact = weights.map((weight) => (weight * 1000) / total);
  const tenths = exact.map(Math.floor);
  const byRemainder = exact.map((_, i) => i).sort((a, b) => (exact[b]! % 1) - (exact[a]! % 1) || a - b);
  const left = 1000 - tenths.reduce((sum, tenth) => sum + tenth, 0);
  for (const i of byRemainder.slice(0, left)) tenths[i]! += 1;
  return tenths;
}

/** The sources of the record's token in the view that `state` chose. */
export function sourcesOf(record: TokenRecord, state: State, layers: number[]): Sources {
  const layer = state.layer === null ? -1 : layers.indexOf(state.layer);
  let name: string;
  let index: number[];
  if (layer < 0) [name, index] = [`all.${state.measure}`, []];
  else if (state.head === null) [name, index] = ["layer", [layer]];
  else [name, index] = ["head", [layer, state.head]];

  const keys = record.get(`${name}.keys`, ...index);
  const weights = record.get(`${name}.weights`, ...index);
  const listed: Source[] = [];
  keys.forEach((key, i) => {
    if (!isMissing(key, keys)) listed.push({ token: key, weight: weights[i]!, tenths: 0 });
  });
  listed.sort((a, b) => b.weight - a.weight || a.token - b.token);

  const sum = listed.reduce((total, source) => total + source.weight, 0);
  const rest = record.has(`${name}.rest`) ? record.get(`${name}.rest`, ...index)[0]! : Math.max(0, ONE - sum);
  const tenths = tenthsOf([...listed.map((source) => source.weight), rest]);
  listed.forEach((source, i) => (source.tenths = tenths[i]!));
  const first = listed.find((source) => source.token === 0);
  let firstTenths = first?.tenths ?? null;
  if (firstTenths === null && layer < 0) firstTenths = Math.round((record.get(`${name}.first`)[0]! * 1000) / ONE);
  const entropy = name === "head" ? record.get("head.entropy", ...index)[0]! / NAT : null;
  return { listed, restTenths: tenths.at(-1)!, firstTenths, entropy };
}

/** 0..1 for a colour: the root lets a tenth of the largest share still be seen; the legend says so. */
export function shade(weight: number, largest: number): number {
  return largest > 0 ? Math.sqrt(Math.min(1, weight / largest)) : 0;
}

export function percent(tenths: number): string {
  return `${Math.floor(tenths / 10)}.${tenths % 10}\u202f%`;
}
