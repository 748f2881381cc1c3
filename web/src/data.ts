// What export.py wrote: one JSON object, then blocks of fixed-size base64 records, one record a token.
// A record is cut out of its block and decoded when its token is selected, so nothing grows with the text.

export interface Field {
  name: string;
  type: "u16" | "u32";
  at: number;
  shape: number[];
}

export interface Data {
  title: string;
  model: string;
  focus: number;
  texts: string[];
  ids: number[];
  layers: number[];
  heads: number;
  record: { chars: number; perBlock: number; fields: Field[] };
}

export type Cells = Uint16Array | Uint32Array;

/** All that is known about one token, as integers: weights in 1/65535, entropy in 1/4096 nat. */
export class TokenRecord {
  constructor(
    private readonly bytes: ArrayBuffer,
    private readonly fields: Map<string, Field>,
  ) {}

  has(name: string): boolean {
    return this.fields.has(name);
  }

  /** The named field, or the part of it at `index` along its leading axes. */
  get(name: string, ...index: number[]): Cells {
    const field = this.fields.get(name);
    if (field === undefined) throw new RangeError(`no field ${name}`);
    let size = field.shape.reduce((product, axis) => product * axis, 1);
    let start = 0;
    index.forEach((i, axis) => {
      size /= field.shape[axis] ?? 1;
      start += i * size;
    });
    return field.type === "u16"
      ? new Uint16Array(this.bytes, field.at + 2 * start, size)
      : new Uint32Array(this.bytes, field.at + 4 * start, size);
  }
}

/** The key that fills a row with fewer sources than it has room for: all ones. */
export function isMissing(key: number, keys: Cells): boolean {
  return key === (keys.BYTES_PER_ELEMENT === 2 ? 0xffff : 0xffffffff);
}

export class Records {
  private readonly fields: Map<string, Field>;

  constructor(private readonly data: Data) {
    this.fields = new Map(data.record.fields.map((field) => [field.name, field]));
  }

  has(name: string): boolean {
    return this.fields.has(name);
  }

  /** The length of the named field's last axis. */
  width(name: string): number {
    return this.fields.get(name)?.shape.at(-1) ?? 0;
  }

  at(token: number): TokenRecord {
    const { chars, perBlock } = this.data.record;
    const block = document.getElementById(`records-${Math.floor(token / perBlock)}`);
    const start = (token % perBlock) * chars;
    const binary = atob((block?.textContent ?? "").slice(start, start + chars));
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
    return new TokenRecord(bytes.buffer, this.fields);
  }
}

export function readData(): Data {
  return JSON.parse(document.getElementById("data")?.textContent ?? "") as Data;
}
