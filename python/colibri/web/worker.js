// worker.js: colibri.wasm in a thread of its own, so that the page stays alive while the model computes.
//
// In:  {kind: "run", prompt, temperature, topP, seed, length}, {kind: "stop"}
// Out: progress (of loading), ready, text (a piece, figures, and experts: the tokens each got, [layers][experts]), end, failed
"use strict";

const SLICE = 30; // milliseconds of computing between two messages

let wasm, memory;
let stopped = false;

/** What WASI's library asks for. Only a clock is used; all else answers "not supported". */
function systemCalls(module) {
  const calls = {
    clock_time_get(_clock, _precision, at) {
      new DataView(memory.buffer).setBigUint64(at, BigInt(Math.round(performance.now() * 1e6)), true);
      return 0;
    },
    proc_exit(status) {
      throw new Error(`colibri.wasm ended with status ${status}`);
    },
  };
  const imports = {};
  for (const { module: space, name } of WebAssembly.Module.imports(module))
    (imports[space] ??= {})[name] = calls[name] ?? (() => 52);
  return imports;
}

const bytesAt = (at, size) => new Uint8Array(memory.buffer, at >>> 0, size);

function sentence() {
  const at = wasm.web_error() >>> 0;
  const bytes = new Uint8Array(memory.buffer, at);
  return new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
}

/** A negative result is a failure. */
function check(result) {
  if (result < 0) throw new Error(sentence() || `status ${-result}`);
  return result;
}

async function get(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${answer.statusText}`);
  return answer;
}

async function load() {
  const module = await WebAssembly.compileStreaming(get("colibri.wasm"));
  wasm = (await WebAssembly.instantiate(module, systemCalls(module))).exports;
  memory = wasm.memory;
  wasm._initialize();

  const answer = await get("model.colibri");
  const size = Number(answer.headers.get("Content-Length"));
  const start = wasm.web_model(size) >>> 0;
  if (start === 0) throw new Error(`no memory for a model of ${size} bytes`);
  let done = 0;
  for (const reader = answer.body.getReader(); ; ) {
    const { done: over, value } = await reader.read();
    if (over) break;
    if (done + value.length > size) throw new Error("the model is longer than the server said");
    bytesAt(start + done, value.length).set(value);
    done += value.length;
    postMessage({ kind: "progress", done, size });
  }
  if (done < size) throw new Error("the model's transfer was cut short");
  check(wasm.web_open());
  postMessage({
    kind: "ready", size, layers: wasm.web_layers(), experts: wasm.web_experts_per_layer(),
    topK: wasm.web_top_k(), context: wasm.web_context(),
  });
}

/** Lets messages that wait, such as "stop", in. */
const breathe = () => new Promise((resolve) => {
  const channel = new MessageChannel();
  channel.port1.onmessage = () => { channel.port1.close(); resolve(); };
  channel.port2.postMessage(0);
});

function experts() {
  const at = wasm.web_experts() >>> 0;
  return new Uint32Array(memory.buffer, at, wasm.web_layers() * wasm.web_experts_per_layer()).slice();
}

async function run({ prompt, temperature, topP, seed, length }) {
  stopped = false;
  const bytes = new TextEncoder().encode(prompt);
  const at = wasm.web_prompt(bytes.length) >>> 0;
  if (at === 0) throw new Error("no memory for the prompt");
  bytesAt(at, bytes.length).set(bytes);
  const base = experts();
  const promptTokens = check(wasm.web_start(temperature, topP, seed));
  const most = Math.min(length, wasm.web_context() - promptTokens + 1); // the last one is not run
  const decoder = new TextDecoder();
  const began = performance.now();
  let tokens = 0, text = "", reason = most < length ? "full" : "length", told = began;
  const tell = () => {
    const used = experts().map((count, i) => count - base[i]);
    postMessage({ kind: "text", text, tokens, promptTokens, seconds: (performance.now() - began) / 1000, experts: used });
    text = "";
    told = performance.now();
  };
  tell();
  while (tokens < most) {
    const more = check(wasm.web_step(tokens === most - 1 ? 1 : 0));
    text += decoder.decode(bytesAt(wasm.web_piece(), wasm.web_piece_size()));
    if (more === 0) { reason = "end"; break; }
    tokens++;
    if (performance.now() - told < SLICE) continue;
    tell();
    await breathe();
    if (stopped) { reason = "stopped"; break; }
  }
  tell();
  postMessage({ kind: "end", reason });
}

const failed = (error) => postMessage({ kind: "failed", message: error.message ?? String(error) });

onmessage = ({ data }) => {
  if (data.kind === "stop") stopped = true;
  else run(data).catch(failed);
};

load().catch((error) => postMessage({ kind: "failed", loading: true, message: error.message ?? String(error) }));
