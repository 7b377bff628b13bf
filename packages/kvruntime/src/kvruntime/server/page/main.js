// Puts the parts together.

import { Chat } from "./chat.js";
import { Palette, readTheme } from "./colours.js";
import { modelName } from "./completions.js";
import { EventList } from "./happenings.js";
import { LiveStream } from "./live.js";
import { BlockMap } from "./map.js";
import { RequestList } from "./requests.js";
import { Scene } from "./scene.js";
import { Access } from "./sse.js";
import { Usage } from "./usage.js";

const SYSTEM = "You are a patient teacher. Answer in a few short sentences, in words that a child understands.";
const SUGGESTIONS = ["What is a page table?", "Why is the sky blue?", "Tell me a short story about a lighthouse."];

const byId = (id) => document.getElementById(id);
const access = new Access(byId("access"));
const palette = new Palette();
let theme = readTheme();
let latest = null;
let isDrawn = true;

// ── memory ──────────────────────────────────────────────────────────────────────────────────

const map = new BlockMap(byId("map"), byId("tip"));
const usage = new Usage(byId("usage"), byId("key-list"), byId("lead"));
const requests = new RequestList(byId("requests"), {
  count: byId("num-requests"),
  none: byId("no-requests"),
  more: byId("more-requests"),
  onPoint: (id) => map.highlight(id),
});
const happenings = new EventList(byId("events"), (fresh) => {
  for (const event of fresh) if (event.blocks.length) map.notice(event.blocks);
});

function draw() {
  isDrawn = true;
  if (!latest) return;
  const scene = new Scene(latest, palette);
  usage.show(scene);
  map.show(scene, theme);
  requests.show(scene, palette, theme);
  happenings.show(latest.events);
  chat.colour(latest.requests, palette);
}

function drawSoon() {
  if (!isDrawn) return;
  isDrawn = false;
  requestAnimationFrame(draw);
}

const connection = byId("connection");
const live = new LiveStream("debug/blocks/stream", access, {
  onSnapshot: (snapshot) => {
    latest = snapshot;
    drawSoon();
  },
  onState: (state, text) => {
    if (connection.textContent === text) return;
    connection.dataset.state = state;
    byId("memory").classList.toggle("stale", state === "lost");
    connection.textContent = text;
    if (state === "live") showModel();
  },
});

// ── chat ────────────────────────────────────────────────────────────────────────────────────

const chat = new Chat(
  {
    log: byId("log"),
    welcome: byId("welcome"),
    spoken: byId("spoken"),
    send: byId("send"),
    sendFour: byId("send-four"),
    stop: byId("stop"),
  },
  access,
  drawSoon,
);
const message = byId("message");
const samples = byId("samples");
byId("system").value = SYSTEM;

function ask(times) {
  const composer = byId("composer");
  if (!composer.checkValidity()) {
    byId("settings").open = true;
    composer.reportValidity();
    return;
  }
  const text = message.value;
  if (chat.isBusy || !text.trim()) {
    message.focus();
    return;
  }
  const options = {
    system: byId("system").value.trim(),
    n: Number(samples.value),
    maxTokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
  };
  message.value = "";
  chat.ask(text, options, times);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(1);
});
byId("send-four").addEventListener("click", () => ask(4));
byId("stop").addEventListener("click", () => {
  chat.abort?.abort();
  message.focus();
});
byId("clear").addEventListener("click", () => {
  chat.clear();
  message.focus();
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask(1);
});
samples.addEventListener("input", () => {
  byId("samples-value").value = samples.value;
});
for (const text of SUGGESTIONS) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => {
    message.value = text;
    ask(1);
  });
  const entry = document.createElement("li");
  entry.append(button);
  byId("suggestions").append(entry);
}

async function showModel() {
  try {
    const name = await modelName(access, { again: true });
    byId("model").textContent = name;
    if (name) document.title = `${name} on kvruntime`;
  } catch {
    // The stream says that there is no connection.
  }
}

// ── light and dark ──────────────────────────────────────────────────────────────────────────

const dark = matchMedia("(prefers-color-scheme: dark)");
function retheme() {
  theme = readTheme();
  draw();
}
dark.addEventListener("change", retheme);
byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("kvruntime-theme", root.dataset.theme);
  retheme();
});
const chosen = localStorage.getItem("kvruntime-theme");
if (chosen === "light" || chosen === "dark") {
  document.documentElement.dataset.theme = chosen;
  theme = readTheme();
}
addEventListener("resize", drawSoon);

live.run();
