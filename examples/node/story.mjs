// story.mjs: continues a prompt, greedily; the text appears as it is made. The library is WebAssembly here: one file for every
// system and processor, no compiler and no packages; Node.js 18 or newer.
//
//     python -m ziglang build web --prefix PREFIX      (makes PREFIX/web/colibri.wasm)
//     COLIBRI_WASM=PREFIX/web/colibri.wasm node story.mjs model.colibri "Once upon a time" [tokens]
//
// Without COLIBRI_WASM it is the colibri.wasm beside this file. It computes with one thread.
import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { Colibri } from "./colibri.mjs";

function findLibrary() {
  const path = process.env.COLIBRI_WASM || fileURLToPath(new URL("colibri.wasm", import.meta.url));
  if (existsSync(path)) return path;
  throw new Error(`there is no library at '${path}': COLIBRI_WASM names it, and "zig build web" makes it`);
}

/** Done when the bytes are out: nothing is held back, and a reader that has gone is an error here. */
const print = (bytes) =>
  new Promise((resolve, reject) => process.stdout.write(bytes, (error) => (error ? reject(error) : resolve())));

async function tell(path, prompt, most) {
  const model = new Colibri(findLibrary(), path);
  await print(prompt);
  for (const piece of model.write(prompt, most)) await print(piece);
  await print("\n");
}

async function main([path, prompt, tokens = "60"]) {
  if (prompt === undefined || !/^\d+$/.test(tokens)) {
    console.error("usage: story.mjs MODEL PROMPT [TOKENS]");
    return 2;
  }
  process.stdout.on("error", () => {}); // print tells of it
  try {
    await tell(path, prompt, Number(tokens));
    return 0;
  } catch (error) {
    console.error(`story.mjs: ${error.message}`);
    return 1;
  }
}

process.exitCode = await main(process.argv.slice(2));
