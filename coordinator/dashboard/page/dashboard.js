// Reads the stream of snapshots, and shows each snapshot.

import { addSegments, drawStream } from "./stream.js";
import { updateCharts, updateRules } from "./charts.js";
import { byId, element, setChildren, setText } from "./elements.js";
import { clock, duration, number, plural, rate, value } from "./format.js";
import { updateTables } from "./tables.js";

let state = null;
let receivedAt = 0;
let isWhole = true;
let hasEnded = false;

const source = new EventSource("api/stream");
source.onopen = () => (isWhole = true);
source.onmessage = (message) => {
  state = JSON.parse(message.data);
  receivedAt = performance.now();
  hasEnded = false;
  addSegments(state.stream, state.workers, isWhole);
  isWhole = false;
  showConnection("live", "Live");
  show();
};
// The program may be started again at the same address, so the browser goes on trying.
source.onerror = () => showConnection(hasEnded ? "ended" : "lost", hasEnded ? "Ended" : "Not connected");
source.addEventListener("end", () => {
  hasEnded = true;
  showConnection("ended", "Ended");
});

function showConnection(kind, text) {
  byId("connection").dataset.state = kind;
  setText(byId("connection"), text);
}

// Returns the time on the server's clock, which stands still while nothing is received.
function now() {
  const isLive = byId("connection").dataset.state === "live";
  return state.time + (isLive ? (performance.now() - receivedAt) / 1000 : 0);
}

function show() {
  if (!state || document.hidden) return;
  document.title = `${rate(state.rate)} steps/s · ${state.program || "coordinator"}`;
  setText(byId("program"), state.program || "coordinator");
  showHeadline();
  updateCharts(state);
  updateTables(state, now());
  updateRules(state);
  setText(byId("advice"), state.advice);
  showTimeline();
  showClock();
}

function showClock() {
  if (!state || document.hidden) return;
  setText(byId("elapsed"), `running for ${duration(now() - state.started)}`);
  byId("stream").querySelector("canvas").dataset.now = now();
  drawStream(now());
}

function showHeadline() {
  const live = state.workers.filter((worker) => worker.state === "live").length;
  const lost = state.workers.filter((worker) => worker.state === "lost").length;
  const problems = [];
  if (state.failed) problems.push(`${number(state.failed)} failed`);
  if (state.cancelled) problems.push(`${number(state.cancelled)} cancelled`);
  if (state.retried) problems.push(`${number(state.retried)} retried`);
  const tiles = [
    { name: "Steps per second", text: rate(state.rate), note: "mean of 10 s" },
    { name: "Finished", text: number(state.finished), note: problems.join(", ") || "none failed",
      level: state.failed ? "warning" : "" },
    { name: "Running", text: number(state.running), note: `on ${plural(state.workers.filter((row) => row.function).length, "worker")}` },
    { name: "Waiting", text: number(state.waiting), note: waitingNote() },
    { name: "Workers", text: `${live} / ${state.workers.length}`, note: lost ? `${lost} lost` : "all live",
      level: lost ? "error" : "" },
    { name: "Last checkpoint", text: state.checkpoint_time ? duration(now() - state.checkpoint_time) : "none",
      note: state.checkpoint_time ? `ago · ${state.checkpoint.split("/").pop()}` : "nothing saved yet" },
  ];
  const [name] = "loss" in state.values ? ["loss"] : Object.keys(state.values);
  if (name) tiles.splice(1, 0, { name, text: value(state.values[name]), note: "as reported last" });
  setChildren(byId("headline"), tiles, (tile) => tile.name, createTile, (child, tile) => {
    child.dataset.level = tile.level ?? "";
    const [, text, note] = child.firstChild.children;
    setText(text, tile.text);
    setText(note, tile.note);
    note.title = tile.note;
  });
}

function waitingNote() {
  if (!state.waiting || !state.rate) return state.waiting ? "for a worker" : "the queue is empty";
  const seconds = state.waiting / state.rate;
  return seconds < 1 ? "less than 1 s of work" : `${duration(seconds)} of work`;
}

function createTile(tile) {
  const made = element("div", "", { className: "tile" });
  const list = element("dl");
  list.append(element("dt", tile.name), element("dd"), element("dd"));
  made.append(list);
  return made;
}

function showTimeline() {
  const create = () => {
    const item = element("li");
    item.append(element("time"), element("span"));
    return item;
  };
  setChildren(byId("timeline"), [...state.timeline].reverse(), (entry) => entry.number, create, (item, entry) => {
    item.dataset.level = entry.level;
    setText(item.firstChild, clock(entry.time));
    setText(item.lastChild, entry.text);
  });
  byId("timeline-hint").hidden = state.timeline.length > 0;
}

setInterval(showClock, 250);
document.addEventListener("visibilitychange", show);
window.addEventListener("resize", showClock);
