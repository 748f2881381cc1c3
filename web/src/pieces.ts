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

/** Whether most tokens that have letters are of a script written from right to left. */
export function isRightToLeft(texts: string[]): boolean {
  let right = 0;
  let letters = 0;
  for (const text of texts) {
    if (!/\p{L}/u.test(text)) continue;
    letters += 1;
    if (RIGHT_TO_LEFT.test(text)) right += 1;
  }
  return 2 * right > letters;
}
