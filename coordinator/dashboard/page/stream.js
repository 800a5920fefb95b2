// The task stream: a row for each worker, and what it has run in the last minute.

import { byId, color, element, setChildren, setText } from "./elements.js";
import { duration } from "./format.js";

const length = 60;
const hues = [222, 162, 268, 32, 196, 330, 96, 245];
const bad = new Set(["failed", "lost", "retried", "cancelled"]);
const box = byId("stream");
const canvas = box.querySelector("canvas");
const tip = box.querySelector(".tip");
const axisHeight = 20;

// Worker -> its segments, oldest first.
const rows = new Map();
// Function -> its hue.
const hueOf = new Map();
let shown = [];

// Adds segments. A segment replaces the segments of its worker that do not begin earlier.
export function addSegments(segments, workers, isWhole) {
  if (isWhole) rows.clear();
  for (const [worker, start, end, name, outcome, closures] of segments) {
    if (!rows.has(worker)) rows.set(worker, []);
    const row = rows.get(worker);
    while (row.length && row[row.length - 1].start >= start) row.pop();
    row.push({ start, end, name, outcome, closures });
    if (!hueOf.has(name)) hueOf.set(name, hues[hueOf.size % hues.length]);
  }
  shown = workers.map((worker) => worker.index);
}

function rowHeight() {
  if (shown.length <= 8) return 26;
  if (shown.length <= 24) return 16;
  return shown.length <= 64 ? 9 : shown.length <= 128 ? 4 : 2;
}

function fill(name) {
  const isDark = window.matchMedia("(prefers-color-scheme: dark)").matches;
  return `hsl(${hueOf.get(name)} ${isDark ? "70% 62%" : "66% 56%"})`;
}

export function drawStream(now) {
  const height = rowHeight();
  const size = { width: box.clientWidth, height: Math.max(1, shown.length) * height + axisHeight };
  const scale = window.devicePixelRatio;
  canvas.style.height = `${size.height}px`;
  canvas.width = Math.round(size.width * scale);
  canvas.height = Math.round(size.height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = '11px system-ui, "Noto Sans", "DejaVu Sans", sans-serif';
  const label = height >= 9 ? 34 : 0;
  const place = { label, height, gap: height > 8 ? 2 : height > 2 ? 1 : 0, width: size.width - label, now };
  drawAxis(context, place, size);
  const names = new Set();
  let hasBad = false;
  shown.forEach((worker, number) => {
    const row = rows.get(worker) ?? [];
    while (row.length && row[0].end < now - length) row.shift();
    const top = number * height;
    context.fillStyle = color("line");
    context.fillRect(label, top, place.width, height - place.gap);
    for (const segment of row) {
      names.add(segment.name);
      hasBad ||= bad.has(segment.outcome);
      drawSegment(context, place, top, segment);
    }
    if (label) {
      context.fillStyle = color("muted");
      if (height >= 12 || number % 4 === 0) context.fillText(String(worker), 2, top + height / 2 + 4);
    }
  });
  updateLegend([...names].slice(0, 8), hasBad);
}

function drawAxis(context, place, size) {
  context.fillStyle = color("muted");
  for (let ago = 60; ago >= 0; ago -= size.width < 500 ? 20 : 10) {
    const x = place.label + place.width * (1 - ago / length);
    const text = ago ? `−${ago} s` : "now";
    context.textAlign = ago === 60 ? "left" : ago === 0 ? "right" : "center";
    context.fillText(text, x, size.height - 5);
  }
  context.textAlign = "left";
}

function drawSegment(context, place, top, segment) {
  const at = (time) => place.label + place.width * Math.max(0, 1 - (place.now - time) / length);
  const start = at(segment.start);
  // A running segment ends at the right edge, which is now.
  const end = segment.outcome === "running" ? place.label + place.width : at(segment.end);
  context.fillStyle = bad.has(segment.outcome) ? color("error") : fill(segment.name);
  // A segment fills whole pixels, at least one, so that segments that follow each other have no seam.
  context.fillRect(Math.floor(start), top, Math.ceil(end) - Math.floor(start), place.height - place.gap);
}

function updateLegend(names, hasBad) {
  const entries = names.map((name) => ({ name, color: fill(name) }));
  if (hasBad) entries.push({ name: "failed, lost or repeated", color: color("error") });
  setChildren(byId("stream-legend"), entries, (entry) => entry.name, (entry) => element("span", entry.name),
    (child, entry) => child.style.setProperty("--color", entry.color));
}

canvas.addEventListener("pointermove", (event) => {
  const { left, top, width } = canvas.getBoundingClientRect();
  const label = rowHeight() >= 9 ? 34 : 0;
  const worker = shown[Math.floor((event.clientY - top) / rowHeight())];
  const share = (event.clientX - left - label) / (width - label);
  const now = Number(canvas.dataset.now);
  const time = now - length * (1 - share);
  const segment = rows.get(worker)?.findLast((each) => each.start <= time);
  const isInside = segment && (segment.outcome === "running" || segment.end >= time);
  tip.hidden = worker === undefined;
  if (tip.hidden) return;
  const calls = isInside && segment.closures > 1 ? ` × ${segment.closures.toLocaleString("en")}` : "";
  const span = isInside ? (segment.outcome === "running" ? now : segment.end) - segment.start : 0;
  setText(tip, `worker ${worker}\n${isInside ? `${segment.name}${calls}\n${segment.outcome}, ${duration(span)}` : "idle"}`);
  tip.style.left = `${Math.min(event.clientX - left + 14, width - tip.offsetWidth - 4)}px`;
  tip.style.top = `${event.clientY - top + 14}px`;
});
canvas.addEventListener("pointerleave", () => (tip.hidden = true));
