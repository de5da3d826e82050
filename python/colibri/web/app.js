// app.js: the page around worker.js: the form, the text as it comes, its speed, and which experts were used.
"use strict";

const $ = (id) => document.getElementById(id);
const form = $("form"), story = $("story"), written = $("written"), canvas = $("heat");
const worker = new Worker("worker.js");
const HALF_LIFE = 8; // tokens, of the heat of "latest tokens"

let shape = null; // {layers, experts, topK, context}
let running = false;
let counts = null; // [layers][experts]: tokens of this text
let heat = null; // the same, older ones fading
let seen = 0; // tokens that heat knows of

// ---- The form

function setRunning(now) {
  running = now;
  $("go").textContent = now ? "Stop" : "Write";
  $("go").classList.toggle("stop", now);
  document.body.classList.toggle("running", now);
  story.setAttribute("aria-busy", String(now));
}

function say(text, wrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", wrong);
}

function start() {
  const prompt = $("prompt").value;
  $("given").textContent = prompt;
  written.textContent = "";
  counts = heat = null;
  seen = 0;
  setRunning(true);
  say("Reading the prompt …");
  worker.postMessage({
    kind: "run", prompt, temperature: Number($("temperature").value), topP: 0.95,
    seed: crypto.getRandomValues(new Uint32Array(1))[0], length: Number($("length").value),
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) worker.postMessage({ kind: "stop" });
  else start();
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (shape && !running) start();
});

function showSettings() {
  const temperature = Number($("temperature").value);
  $("temperature-value").textContent = temperature === 0 ? "0, always the likeliest" : temperature.toFixed(1);
  $("length-value").textContent = `${$("length").value} tokens`;
}
for (const name of ["temperature", "length"]) $(name).addEventListener("input", showSettings);
showSettings();

// ---- What the worker says

const REASONS = {
  end: "The story has ended.", length: "Cut at the length you chose.", stopped: "Stopped.",
  full: "The model's context is full.",
};

const speed = (tokens, seconds) => (tokens && seconds > 0 ? (tokens / seconds).toFixed(1) : "–");

const told = {
  progress({ done, size }) {
    $("loaded").value = done / size;
  },
  ready(about) {
    shape = about;
    $("loaded").hidden = true;
    $("go").disabled = false;
    $("length").max = Math.min(about.context, 1024);
    showSettings();
    $("about").textContent =
      `${(about.size / 1e6).toFixed(1)} MB · ${about.layers} layers · ${about.experts} experts, ${about.topK} for a token`;
    say("Ready.");
    draw();
    const asked = new URLSearchParams(location.search);
    if (asked.has("prompt")) $("prompt").value = asked.get("prompt");
    if (asked.get("autorun") === "1") start();
  },
  text({ text, tokens, promptTokens, seconds, experts }) {
    const low = story.scrollHeight - story.scrollTop - story.clientHeight < 40;
    written.append(text);
    if (low) story.scrollTop = story.scrollHeight;
    $("tokens").textContent = tokens;
    $("speed").textContent = speed(tokens, seconds);
    $("prompt-tokens").textContent = promptTokens;
    say("Writing …");
    warm(experts, promptTokens + tokens);
    draw();
  },
  end({ reason }) {
    setRunning(false);
    say(`${REASONS[reason]} ${$("tokens").textContent} tokens, ${$("speed").textContent} tokens per second.`);
    document.body.dataset.ended = reason;
  },
  failed({ message, loading }) {
    setRunning(false);
    if (loading) $("go").disabled = true;
    $("loaded").hidden = true;
    say(message, true);
  },
};
worker.onmessage = ({ data }) => told[data.kind](data);
worker.onerror = (event) => told.failed({ message: event.message || "the worker could not be started" });

// ---- The heat map

function warm(experts, tokens) {
  const fade = 0.5 ** (Math.max(0, tokens - seen) / HALF_LIFE);
  heat = Float64Array.from(experts, (count, i) => (heat ? heat[i] * fade : 0) + count - (counts ? counts[i] : 0));
  counts = experts;
  seen = tokens;
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** From --heat-0 over --heat-1 to --heat-2. */
function ramp() {
  const stops = [0, 1, 2].map((i) => channels(style(`--heat-${i}`)));
  return (share) => {
    const at = Math.min(1, Math.max(0, share)) * 2, low = Math.min(1, Math.floor(at));
    return `rgb(${stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * (at - low))).join()})`;
  };
}

/** Where cells lie, in CSS pixels. */
function geometry() {
  const width = canvas.parentElement.clientWidth, left = 26, top = 18;
  const cell = Math.max(2, (width - left) / shape.experts);
  const row = Math.max(4, Math.min(34, 300 / shape.layers));
  return { width, left, top, cell, row, height: top + row * shape.layers };
}

function draw() {
  if (!shape) return;
  const g = geometry(), ratio = devicePixelRatio || 1, paint = canvas.getContext("2d"), colour = ramp();
  canvas.width = Math.round(g.width * ratio);
  canvas.height = Math.round(g.height * ratio);
  canvas.style.height = `${g.height}px`;
  paint.scale(ratio, ratio);
  paint.font = "11px system-ui, sans-serif";
  paint.fillStyle = style("--muted");
  paint.textBaseline = "middle";
  const values = $("recent").checked ? heat : counts;
  const gap = g.cell > 8 ? 2 : 0, most = values ? Math.max(1e-9, ...rowsMost(values)) : 1;
  label(paint, g);
  for (let layer = 0; layer < shape.layers; layer++) {
    for (let expert = 0; expert < shape.experts; expert++) {
      paint.fillStyle = colour(values ? values[layer * shape.experts + expert] / most : 0);
      paint.beginPath();
      paint.roundRect(g.left + expert * g.cell, g.top + layer * g.row, g.cell - gap, g.row - gap, gap ? 3 : 0);
      paint.fill();
    }
  }
  describe();
}

function rowsMost(values) {
  const rows = [];
  for (let at = 0; at < values.length; at += shape.experts) rows.push(Math.max(...values.subarray(at, at + shape.experts)));
  return rows;
}

function label(paint, g) {
  const each = (size, room) => Math.max(1, Math.ceil(room / size));
  paint.textAlign = "right";
  for (let i = 0; i < shape.layers; i += each(g.row, 13)) paint.fillText(i, g.left - 7, g.top + (i + 0.5) * g.row);
  paint.textAlign = "center";
  for (let i = 0; i < shape.experts; i += each(g.cell, 22)) paint.fillText(i, g.left + (i + 0.5) * g.cell - 1, 8);
}

/** The picture in words, for those who do not see it. */
function describe() {
  if (!counts) return;
  const best = counts.indexOf(Math.max(...rowsMost(counts)));
  canvas.setAttribute("aria-label",
    `Heat map, ${shape.layers} layers by ${shape.experts} experts. Used most: expert ${best % shape.experts} of layer ` +
    `${Math.floor(best / shape.experts)}, by ${counts[best]} of ${seen} tokens.`);
}

canvas.addEventListener("pointermove", (event) => {
  if (!shape || !counts) return;
  const g = geometry(), box = canvas.getBoundingClientRect();
  const expert = Math.floor((event.clientX - box.left - g.left) / g.cell);
  const layer = Math.floor((event.clientY - box.top - g.top) / g.row);
  const inside = expert >= 0 && expert < shape.experts && layer >= 0 && layer < shape.layers;
  $("cell").textContent = inside
    ? `Layer ${layer}, expert ${expert}: ${counts[layer * shape.experts + expert]} tokens of this text` : "\u00a0";
});
canvas.addEventListener("pointerleave", () => { $("cell").textContent = "\u00a0"; });
for (const name of ["recent", "whole"]) $(name).addEventListener("change", draw);
new ResizeObserver(draw).observe(canvas.parentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
