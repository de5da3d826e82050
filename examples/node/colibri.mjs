// What the program needs of libcolibri: the functions of colibri.wasm (their source: tools/colibri-web.c), with strings and
// bytes instead of pointers, and errors instead of statuses.
import { closeSync, fstatSync, openSync, readFileSync, readSync } from "node:fs";

const STATUS_NAMES = [
  "OK", "ERR_INVALID_ARGUMENT", "ERR_ALIGNMENT", "ERR_OUT_OF_MEMORY", "ERR_WORKSPACE", "ERR_BUFFER_TOO_SMALL", "ERR_NOT_FOUND",
  "ERR_IO", "ERR_FORMAT", "ERR_VERSION", "ERR_CHECKSUM", "ERR_UNSUPPORTED", "ERR_TOKEN", "ERR_SLOT_FULL", "ERR_STATE",
  "ERR_NOT_FINITE", "ERR_CANCELLED", "ERR_NO_TOKENIZER", "ERR_ISA", "ERR_THREAD",
]; // colibri_status_t, 0 ...
const LARGEST_MODEL = 2 ** 32 - 1; // WebAssembly's addresses have 32 bits
const READ_AT_ONCE = 2 ** 24;
const NOT_SUPPORTED = 58; // WASI's ENOTSUP

/** A failed call: the library's sentence, and its status. */
export class ColibriError extends Error {
  constructor(status, sentence) {
    const name = `COLIBRI_${STATUS_NAMES[status] ?? status}`;
    super(`${sentence} (${name})`);
    this.name = name;
  }
}

const statusOf = (name) => STATUS_NAMES.indexOf(name);

/** Open a file, with the library's own words for what may go wrong. */
function openFile(path) {
  try {
    return openSync(path, "r");
  } catch (error) {
    if (error.code === "ENOENT" || error.code === "ENOTDIR")
      throw new ColibriError(statusOf("ERR_NOT_FOUND"), `there is no file '${path}'`);
    throw new ColibriError(statusOf("ERR_IO"), `cannot open '${path}': ${error.message}`);
  }
}

/** What C's library asks of the system: a clock. All else, should it ever ask, is not supported. */
function systemCalls(module, memory) {
  const calls = {
    clock_time_get(_clock, _precision, at) {
      new DataView(memory().buffer).setBigUint64(at >>> 0, process.hrtime.bigint(), true);
      return 0;
    },
    proc_exit(status) {
      throw new Error(`colibri.wasm ended with status ${status}`);
    },
  };
  const imports = {};
  for (const { module: space, name } of WebAssembly.Module.imports(module))
    (imports[space] ??= {})[name] = calls[name] ?? (() => NOT_SUPPORTED);
  return imports;
}

/** A model and one text at a time. */
export class Colibri {
  #wasm;

  /** wasmPath: colibri.wasm; modelPath: a .colibri file, which goes into memory whole. */
  constructor(wasmPath, modelPath) {
    const module = new WebAssembly.Module(readFileSync(wasmPath));
    this.#wasm = new WebAssembly.Instance(module, systemCalls(module, () => this.#wasm.memory)).exports;
    this.#wasm._initialize();
    this.#load(modelPath);
    this.#check(this.#wasm.web_open());
  }

  /** The text that follows the prompt, greedily: `most` tokens at most, as pieces of UTF-8, each of whole characters. */
  *write(prompt, most) {
    const text = new TextEncoder().encode(prompt);
    const at = this.#wasm.web_prompt(text.length) >>> 0;
    if (at === 0) throw new ColibriError(statusOf("ERR_OUT_OF_MEMORY"), `no memory for a prompt of ${text.length} bytes`);
    this.#bytes(at, text.length).set(text);
    this.#check(this.#wasm.web_start(0, 1, 0)); // temperature, top-p and seed: always the likeliest token
    for (let i = 0; i < most; i++) {
      const more = this.#wasm.web_step(i === most - 1 ? 1 : 0);
      yield this.#bytes(this.#wasm.web_piece(), this.#wasm.web_piece_size()).slice();
      if (this.#check(more) === 0) return;
    }
  }

  /** The file's bytes, into memory that the library gives. */
  #load(path) {
    const file = openFile(path);
    try {
      const about = fstatSync(file);
      if (!about.isFile()) throw new ColibriError(statusOf("ERR_FORMAT"), `'${path}' is not a regular file`);
      const size = about.size;
      const at = size > LARGEST_MODEL ? 0 : this.#wasm.web_model(size) >>> 0;
      if (at === 0) throw new ColibriError(statusOf("ERR_OUT_OF_MEMORY"), `no memory for a model of ${size} bytes`);
      for (let done = 0, got; done < size; done += got) {
        got = readSync(file, this.#bytes(at + done, Math.min(size - done, READ_AT_ONCE)));
        if (got === 0) throw new ColibriError(statusOf("ERR_IO"), `'${path}' was cut short while it was read`);
      }
    } finally {
      closeSync(file);
    }
  }

  /** A view that is good until the next call: memory that grows leaves its views behind. */
  #bytes(at, size) {
    return new Uint8Array(this.#wasm.memory.buffer, at >>> 0, size);
  }

  /** A negative result is a failure. */
  #check(result) {
    if (result >= 0) return result;
    const rest = new Uint8Array(this.#wasm.memory.buffer, this.#wasm.web_error() >>> 0);
    throw new ColibriError(-result, new TextDecoder().decode(rest.subarray(0, rest.indexOf(0))));
  }
}
