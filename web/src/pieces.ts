// Token text that may be anything, made fit to be read: what is invisible gets a visible sign.

// Control and format characters, separators, unassigned and private ones; not the joiners inside emoji and
// Indic or Persian words (200C, 200D), nor the Arabic number signs, which are visible though "format".
const UNSEEN = /(?![\u200c\u200d\u0600-\u0605\u06dd\u08e2])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cn}\p{Co}\p{Cs}]/gu;
const ONLY_JOINERS = /^[\u200c\u200d\ufe00-\ufe0f]+$/;

function sign(character: string): string {
  const code = character.codePointAt(0) ?? 0xfffd;
  if (code === 0x0a) return "\u23ce";
  if (code === 0x09) return "\u2192";
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  if (code >= 0xd800 && code <= 0xdfff) return "\ufffd";
  return codePoint(code);
}

function codePoint(code: number): string {
  return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
}

/** The text with signs for what cannot be seen; leading spaces stay spaces. */
export function readable(text: string, id: number): string {
  if (text === "") return `\u27e8id ${id}\u27e9`;
  if (ONLY_JOINERS.test(text)) return [...text].map((character) => codePoint(character.codePointAt(0)!)).join("");
  // A mark that would sit on the token before it gets a dotted circle to sit on.
  return (/^\p{M}/u.test(text) ? "\u25cc" : "") + text.replace(UNSEEN, sign);
}

/** For a place where the spaces at the ends would be lost. */
export function spaced(shown: string): string {
  return shown.replace(/^ +| +$/g, (spaces) => "\u2423".repeat(spaces.length));
}

/** Leading spaces, which are set outside the token's box, and what is set inside it. */
export function split(shown: string): [string, string] {
  const core = shown.replace(/^ +/, "");
  if (core === "") return ["", "\u00b7".repeat(shown.length)];
  return [shown.slice(0, shown.length - core.length), core];
}

const RIGHT_TO_LEFT = /\p{Script=Arabic}|\p{Script=Hebrew}|\p{Script=Syriac}|\p{Script=Thaana}|\p{Script=Nko}/u;
const LONE_BYTE = /\u27e8[0-9A-F]{2}\u27e9/g;

export type Direction = "ltr" | "rtl";

/** Which way a token's letters run; null if it has none, or ends a line. Marks and overrides have no say. */
export function directionOf(shown: string): Direction | null {
  if (shown.includes("\u23ce")) return null;
  if (RIGHT_TO_LEFT.test(shown)) return "rtl";
  return /[\p{L}\p{N}]/u.test(shown.replace(LONE_BYTE, "")) ? "ltr" : null;
}

/** The way that most tokens run. */
export function mainDirection(directions: (Direction | null)[]): Direction {
  const right = directions.filter((direction) => direction === "rtl").length;
  const left = directions.filter((direction) => direction === "ltr").length;
  return right > left ? "rtl" : "ltr";
}

/**
 * Runs of tokens against the main direction, as the token after each run's last by its first: they are set in
 * their own direction, or words made of several tokens would read backwards.
 */
export function runsAgainst(main: Direction, shown: string[], directions: (Direction | null)[]): Map<number, number> {
  const runs = new Map<number, number>();
  let start = -1;
  const end = (last: number): void => {
    if (start >= 0) runs.set(start, last + 1);
    start = -1;
  };
  let last = -1;
  directions.forEach((direction, i) => {
    if (direction === main || shown[i]!.includes("\u23ce")) end(last);
    else if (direction !== null) {
      if (start < 0) start = i;
      last = i;
    }
  });
  end(last);
  return runs;
}
