// Finds words across token borders. A word that spans tokens is found at its last one: the first token
// that has seen all of it.

export class Finder {
  private readonly text: string;
  private readonly ends: number[] = [];

  constructor(shown: string[]) {
    let text = "";
    for (const piece of shown) {
      text += piece.toLowerCase();
      this.ends.push(text.length);
    }
    this.text = text;
  }

  /** The tokens, in order, at which the wanted text ends; `#12` is token 12. */
  find(wanted: string): number[] {
    const number = /^#(\d{1,9})$/.exec(wanted.trim());
    if (number !== null) return Number(number[1]) < this.ends.length ? [Number(number[1])] : [];
    const needle = wanted.toLowerCase();
    if (needle.trim() === "") return [];
    const found: number[] = [];
    let token = 0;
    for (let at = this.text.indexOf(needle); at >= 0; at = this.text.indexOf(needle, at + 1)) {
      const end = at + needle.length;
      while (this.ends[token]! < end) token += 1;
      if (found.at(-1) !== token) found.push(token);
    }
    return found;
  }
}
