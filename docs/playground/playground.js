// A Finch of a million parameters in the browser: one ONNX program reads a token and the states, and returns the logits
// of the next token and the new states.

import * as ort from "./vendor/ort.wasm.bundle.min.mjs";

const MAX_TOKENS = 800;
const TOP_P = 0.95;
const END = 0; // also the token that begins a document

const element = (id) => document.getElementById(id);
let session = null;
let writing = false;
let tune = null;
let audio = null;

/** The ids of a text: the ASCII codes of its characters, without accents, "?" for all others. */
function encode(text) {
  const plain = text.normalize("NFKD").replace(/\p{M}/gu, "");
  return Array.from(plain, (letter) => (letter.codePointAt(0) < 128 ? letter.codePointAt(0) : 63));
}

/** Random numbers from 0 to 1, the same ones for the same seed (mulberry32). */
function makeRandom(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let x = Math.imul(seed ^ (seed >>> 15), seed | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** One of the most likely tokens that have the probability TOP_P together. */
function sample(logits, temperature, random) {
  const largest = Math.max(...logits);
  const weights = Array.from(logits, (logit, id) => ({ id, weight: Math.exp((logit - largest) / temperature) }));
  weights.sort((a, b) => b.weight - a.weight);
  const total = weights.reduce((sum, { weight }) => sum + weight, 0);
  let kept = 0;
  const nucleus = weights.slice(0, 1 + weights.findIndex(({ weight }) => (kept += weight) >= TOP_P * total) || 1);
  let left = random() * nucleus.reduce((sum, { weight }) => sum + weight, 0);
  return (nucleus.find(({ weight }) => (left -= weight) <= 0) ?? nucleus[0]).id;
}

/** The states before a text, zeros, as the inputs of the program. */
function initialStates() {
  const inputs = session.inputMetadata.filter(({ name }) => name.startsWith("past."));
  return Object.fromEntries(
    inputs.map(({ name, type, shape }) => {
      const size = shape.reduce((product, side) => product * side, 1);
      const values = { float32: Float32Array, int64: BigInt64Array, bool: Uint8Array }[type];
      return [name, new ort.Tensor(type, new values(size), shape)];
    }),
  );
}

/** Reads one token. Returns the logits of the next one and the new states. */
async function step(id, states) {
  const input_ids = new ort.Tensor("int64", BigInt64Array.of(BigInt(id)), [1, 1]);
  const { logits, ...present } = await session.run({ input_ids, ...states });
  const renamed = Object.entries(present).map(([name, state]) => [name.replace("present.", "past."), state]);
  return [logits.data, Object.fromEntries(renamed)];
}

const bytes = (states) => Object.values(states).reduce((sum, state) => sum + state.data.byteLength, 0);

function drawScore(abc) {
  [tune] = window.ABCJS.renderAbc("score", abc, { responsive: "resize", add_classes: true });
}

/** Plays the notes of the score, with a sound that the browser makes itself. */
function play() {
  audio?.close();
  audio = new AudioContext();
  const { tempo, tracks } = tune.setUpAudio({});
  const second = 240 / tempo; // of a whole note
  for (const { cmd, pitch, start, duration } of tracks.flat()) {
    if (cmd !== "note") continue;
    const oscillator = new OscillatorNode(audio, { type: "triangle", frequency: 440 * 2 ** ((pitch - 69) / 12) });
    const gain = new GainNode(audio, { gain: 0 });
    const [from, to] = [0.1 + start * second, 0.1 + (start + duration) * second];
    gain.gain.setValueAtTime(0.2, from);
    gain.gain.exponentialRampToValueAtTime(0.01, to);
    oscillator.connect(gain).connect(audio.destination);
    oscillator.start(from);
    oscillator.stop(to);
  }
}

/** Writes a tune into the page, token by token. */
async function write() {
  const header = `X:1\nT:${element("title").value.trim() || "Untitled"}\nM:${element("metre").value}\nL:1/8\nK:${element("key").value}\n`;
  const temperature = Math.min(Math.max(Number(element("temperature").value) || 0.8, 0.1), 2);
  const random = makeRandom(Number(element("seed").value));
  const prompt = [END, ...encode(header)];
  let [states, logits, text] = [initialStates(), null, ""];
  const start = performance.now();
  for (let count = 0; count < MAX_TOKENS && writing; count++) {
    const id = count < prompt.length ? prompt[count] : sample(logits, temperature, random);
    if (id === END && count > 0) break;
    [logits, states] = await step(id, states);
    if (id !== END) text += String.fromCharCode(id);
    if (count % 8 === 0) {
      element("abc").textContent = text;
      element("tokens").textContent = String(count + 1);
      element("speed").textContent = ((1000 * (count + 1)) / (performance.now() - start)).toFixed(0);
      element("state").textContent = `${(bytes(states) / 1024).toFixed(1)} KiB`;
      await new Promise((resolve) => setTimeout(resolve)); // the page is drawn
    }
    if (id === 10 && count >= prompt.length) drawScore(text);
  }
  element("abc").textContent = text;
  drawScore(text);
}

element("settings").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (writing) {
    writing = false;
    return;
  }
  writing = true;
  element("play").disabled = true;
  element("write").textContent = "Stop";
  element("status").textContent = "Writing …";
  try {
    await write();
    element("status").textContent = "Done.";
    element("play").disabled = false;
  } catch (error) {
    element("status").textContent = `Writing failed: ${error.message}`;
  }
  writing = false;
  element("write").textContent = "Write a tune";
  element("seed").value = String(Number(element("seed").value) + 1);
});
element("play").addEventListener("click", play);

try {
  ort.env.wasm.wasmPaths = { wasm: new URL("vendor/ort-wasm-simd-threaded.wasm", import.meta.url).href };
  ort.env.wasm.numThreads = 1;
  session = await ort.InferenceSession.create(new URL("decode.onnx", import.meta.url).href);
  element("write").disabled = false;
  element("write").textContent = "Write a tune";
} catch (error) {
  element("write").textContent = "Not available";
  element("status").textContent = `The model could not be loaded: ${error.message}. The page needs a web server: python -m http.server`;
}
