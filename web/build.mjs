// Builds src/regardant/page/static from this folder. With --verify it writes nothing and fails when the
// committed files are not what the source builds.
import { build } from "esbuild";
import { mkdir, readFile, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "src", "regardant", "page", "static");

/** One bundled, minified, pure-ASCII file: it is inlined, so it must survive any encoding of the page. */
async function bundle(entry, format) {
  const result = await build({
    absWorkingDir: here,
    bundle: true,
    charset: "ascii",
    entryPoints: [entry],
    legalComments: "none",
    minify: true,
    target: ["chrome111", "firefox113", "safari16.4"],
    write: false,
    ...(format ? { format } : {}),
  });
  return result.outputFiles[0].text;
}

const files = {
  "page.js": await bundle("src/main.ts", "iife"),
  "page.css": await bundle("src/page.css"),
  "page.html": await readFile(join(here, "src", "page.html"), "utf8"),
};

if (process.argv.includes("--verify")) {
  const stale = [];
  for (const [name, text] of Object.entries(files)) {
    const committed = await readFile(join(target, name), "utf8").catch(() => null);
    if (committed !== text) stale.push(name);
  }
  if (stale.length > 0) {
    console.error(`not what web/src builds: ${stale.join(", ")}; run "npm run build" and commit the result`);
    process.exit(1);
  }
  console.log("the committed page is what web/src builds");
} else {
  await mkdir(target, { recursive: true });
  for (const [name, text] of Object.entries(files)) {
    await writeFile(join(target, name), text);
    console.log(`${name}  ${text.length} bytes`);
  }
}
