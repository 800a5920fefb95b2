// Tables that are described by their columns, and that a click on a column's title sorts.

import { byId, element, setChildren, setText } from "./elements.js";
import { bytes, duration, number, percent, rate } from "./format.js";

// A column has a title, the value to sort by, the text of a cell, and settings of the cell.
const workerColumns = [
  { title: "Worker", sort: (row) => row.index, text: (row) => String(row.index), kind: "text" },
  { title: "State", sort: (row) => row.state, text: (row) => row.state, pill: (row) => row.state, kind: "text" },
  { title: "Running", sort: (row) => row.function, text: running, kind: "text grow" },
  { title: "For", sort: (row) => (row.running_since ? -row.running_since : -Infinity), text: runningFor, minor: true },
  { title: "Steps/s", sort: (row) => row.rate, text: (row) => rate(row.rate), bar: (row) => row.share },
  { title: "Idle", sort: (row) => row.idle, text: (row) => percent(row.idle) },
  { title: "Waits for rule", sort: (row) => row.waited ?? -1, text: (row) => percent(row.waited ?? 0), minor: true,
    shown: (rows) => rows.some((row) => row.waited !== null) },
  { title: "Finished", sort: (row) => row.finished, text: (row) => number(row.finished), minor: true },
  { title: "Failed", sort: (row) => row.failed, text: (row) => number(row.failed), minor: true, bad: true },
  { title: "Retried", sort: (row) => row.retried, text: (row) => number(row.retried), minor: true },
  { title: "Losses", sort: (row) => row.losses, text: (row) => number(row.losses) },
];

const serverColumns = [
  { title: "Server", sort: (row) => Number(row.usage.task.split(" ")[1]), text: (row) => row.usage.task, kind: "text" },
  { title: "State", sort: (row) => row.usage.is_reachable, text: serverState, pill: serverState, kind: "text" },
  { title: "Memory", sort: (row) => row.usage.memory, text: (row) => bytes(row.usage.memory) },
  { title: "CPU", sort: (row) => row.cores, text: (row) => `${row.cores.toFixed(2)} cores` },
  { title: "Receives", sort: (row) => row.receiving, text: (row) => `${bytes(row.receiving)}/s` },
  { title: "Sends", sort: (row) => row.sending, text: (row) => `${bytes(row.sending)}/s` },
];

let now = 0;

function running(row) {
  if (row.state !== "live") return "";
  return row.function ? row.function + (row.calls > 1 ? ` × ${row.calls}` : "") : "idle";
}

function runningFor(row) {
  return row.running_since ? duration(now - row.running_since) : "";
}

function serverState(row) {
  return row.usage.is_reachable ? "live" : "lost";
}

class SortedTable {
  constructor(id, columns, key, state) {
    this.head = byId(id).tHead;
    this.body = byId(id).tBodies[0];
    Object.assign(this, { columns, key, state, sorted: columns[0], direction: 1, rows: [] });
  }

  update(rows) {
    this.rows = rows;
    const columns = this.columns.filter((column) => !column.shown || column.shown(rows));
    if (this.head.rows[0]?.cells.length !== columns.length) this.body.replaceChildren();
    this.updateHead(columns);
    const order = (first, second) => (first < second ? -1 : first > second ? 1 : 0);
    const sorted = [...rows].sort(
      (first, second) => this.direction * order(this.sorted.sort(first), this.sorted.sort(second)),
    );
    const create = () => {
      const row = element("tr");
      row.append(...columns.map((column) => createCell(column)));
      return row;
    };
    setChildren(this.body, sorted, this.key, create, (child, row) => {
      child.className = this.state(row);
      columns.forEach((column, place) => updateCell(child.cells[place], column, row));
    });
  }

  updateHead(columns) {
    if (!this.head.rows.length) this.head.append(element("tr"));
    setChildren(this.head.rows[0], columns, (column) => column.title, (column) => this.createTitle(column),
      (cell, column) => {
        const direction = this.direction > 0 ? "ascending" : "descending";
        if (column === this.sorted) cell.setAttribute("aria-sort", direction);
        else cell.removeAttribute("aria-sort");
      });
  }

  createTitle(column) {
    const cell = element("th", "", { className: `${column.kind ?? ""} ${column.minor ? "minor" : ""}`, scope: "col" });
    const button = element("button", column.title, { type: "button" });
    button.addEventListener("click", () => {
      // At first, numbers are sorted from the largest, which matters most, and text is sorted from A to Z.
      this.direction = this.sorted === column ? -this.direction : column.kind === "text" ? 1 : -1;
      this.sorted = column;
      this.update(this.rows);
    });
    cell.append(button);
    return cell;
  }
}

function createCell(column) {
  const cell = element("td", "", { className: `${column.kind ?? ""} ${column.minor ? "minor" : ""}` });
  cell.append(element("span"));
  if (column.bar) {
    cell.append(element("span", "", { className: "bar minor", title: "as a share of the fastest" }));
    cell.lastChild.append(element("i"));
  }
  return cell;
}

function updateCell(cell, column, row) {
  const text = column.text(row);
  setText(cell.firstChild, text);
  if (column.kind?.includes("grow")) cell.title = text;
  cell.classList.toggle("zero", text === "0" && column.kind !== "text");
  cell.classList.toggle("error", Boolean(column.bad) && text !== "0");
  if (column.bar) cell.lastChild.firstChild.style.width = percent(column.bar(row)).replace(" ", "");
  if (column.pill) {
    cell.firstChild.className = "pill";
    cell.firstChild.dataset.state = column.pill(row);
  }
}

const workers = new SortedTable("workers", workerColumns, (row) => row.index, (row) => row.state);
const servers = new SortedTable("servers", serverColumns, (row) => row.usage.task, (row) => serverState(row));

export function updateTables(state, time) {
  now = time;
  workers.update(state.workers);
  servers.update(state.servers.filter((row) => row.usage.time || !row.usage.is_reachable));
  byId("servers-hint").hidden = byId("servers").tBodies[0].rows.length > 0;
  const lost = state.workers.filter((row) => row.state === "lost");
  const slow = state.workers.filter((row) => row.state === "live" && state.rate && row.share < 0.5);
  const parts = [`${state.workers.length - lost.length} live`];
  if (lost.length) parts.push(`${lost.length} lost`);
  if (slow.length) parts.push(`${slow.length} at less than half the rate of the fastest`);
  setText(byId("workers-summary"), parts.join(", "));
}
