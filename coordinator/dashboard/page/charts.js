// The rate and the reported values over time, and the staleness of the update rules.

import { byId, color, element, setChildren, setText } from "./elements.js";
import { bytes, number, percent, value } from "./format.js";

const { uPlot } = window;
const darkMode = window.matchMedia("(prefers-color-scheme: dark)");
let chosen = "";

class TimeChart {
  constructor(id, format, range) {
    this.parent = byId(id);
    Object.assign(this, { format, range });
    this.chart = null;
    new ResizeObserver(() => this.chart?.setSize(this.size())).observe(this.parent);
    darkMode.addEventListener("change", () => this.draw(this.data, true));
  }

  size() {
    return { width: this.parent.clientWidth, height: this.parent.clientHeight };
  }

  draw(data, isRedrawn = false) {
    this.data = data;
    if (this.chart && !isRedrawn) {
      this.chart.setData(data);
      return;
    }
    this.chart?.destroy();
    const font = '11px system-ui, "Noto Sans", "DejaVu Sans", sans-serif';
    const axis = { font, stroke: color("muted"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false } };
    const time = "{HH}:{mm}:{ss}";
    const times = [
      [86400, "{D} {MMM}", null, null, null, null, null, null, 1],
      [60, "{HH}:{mm}", null, null, null, null, null, null, 1],
      [1, time, null, null, null, null, null, null, 1],
    ];
    this.chart = new uPlot(
      {
        ...this.size(),
        padding: [8, 8, 0, 0],
        legend: { show: false },
        cursor: { points: { size: 7 }, drag: { setScale: false } },
        axes: [
          { ...axis, size: 20, gap: 4, values: times, space: 70 },
          { ...axis, size: 54, gap: 6, space: 36, values: (_, ticks) => ticks.map((tick) => this.format(tick)) },
        ],
        series: [
          {},
          { stroke: color("accent"), fill: color("accent-soft"), width: 2, spanGaps: true, points: { show: false } },
        ],
        scales: { y: { range: (_, low, high) => this.range(low, high) } },
        hooks: { setCursor: [(chart) => this.showTip(chart)] },
      },
      data,
      this.parent,
    );
    this.tip = this.chart.over.appendChild(element("div", "", { className: "tip", hidden: true }));
  }

  showTip(chart) {
    const { idx, left } = chart.cursor;
    const shown = idx === null || left < 0 ? null : chart.data[1][idx];
    this.tip.hidden = shown === null || shown === undefined;
    if (this.tip.hidden) return;
    setText(this.tip, `${new Date(1000 * chart.data[0][idx]).toLocaleTimeString("en-GB")}  ${this.format(shown)}`);
    const right = left > chart.over.clientWidth - 130;
    this.tip.style.left = right ? "auto" : `${left + 10}px`;
    this.tip.style.right = right ? `${chart.over.clientWidth - left + 10}px` : "auto";
    this.tip.style.top = "4px";
  }
}

const rates = new TimeChart("rate-chart", number, (_, high) => [0, high ? 1.1 * high : 1]);
const values = new TimeChart("values-chart", value, (low, high) => uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, false));

export function updateCharts(state) {
  const { history } = state;
  rates.draw([history.times, history.rates]);
  const names = Object.keys(history.values);
  byId("values-hint").hidden = names.length > 0;
  byId("values-chart").hidden = names.length === 0;
  if (!names.length) return;
  if (!names.includes(chosen)) chosen = names.includes("loss") ? "loss" : names[0];
  setText(byId("values-name"), `${chosen} ${chosen in state.values ? value(state.values[chosen]) : ""}`);
  setChildren(byId("values-choice"), names.length > 1 ? names : [], (name) => name, createTab,
    (tab, name) => tab.setAttribute("aria-pressed", String(name === chosen)));
  values.draw([history.times, history.values[chosen]]);

  function createTab(name) {
    const tab = element("button", name, { type: "button" });
    tab.addEventListener("click", () => {
      chosen = name;
      updateCharts(state);
    });
    return tab;
  }
}

const mostBars = 24;

export function updateRules(state) {
  byId("rules-card").hidden = state.rules.length === 0;
  setChildren(byId("rules"), state.rules, (rule) => rule.number, createRule, (child, rule) => {
    const [figures, bars] = child.children;
    setText(figures.firstChild, rule.name);
    const rows = [
      ["Updates", number(rule.updates)],
      ["Pushes", number(rule.pushes)],
      ["Rejected", `${number(rule.rejected)} (${percent(rule.pushes ? rule.rejected / rule.pushes : 0)})`],
      ["Staleness, mean", rule.mean.toFixed(2)],
      ["Staleness, 99th percentile", number(rule.p99)],
      ["Pulled", bytes(rule.bytes_pulled)],
      ["Pushed", bytes(rule.bytes_pushed)],
    ];
    const cells = rows.flat().map((text, place) => ({ text, place }));
    setChildren(figures.lastChild, cells, (cell) => cell.place,
      (cell) => element(cell.place % 2 ? "dd" : "dt"), (shown, cell) => setText(shown, cell.text));
    updateBars(bars, rule.histogram);
  });
}

function createRule() {
  const rule = element("div", "", { className: "rule" });
  const figures = element("div");
  figures.append(element("h3"), element("dl"));
  rule.append(figures, element("div", "", { className: "bars" }));
  return rule;
}

function updateBars(parent, histogram) {
  const width = Math.ceil(histogram.length / mostBars);
  const bars = [];
  for (let first = 0; first < histogram.length; first += width) {
    const count = histogram.slice(first, first + width).reduce((sum, each) => sum + each, 0);
    const last = Math.min(first + width, histogram.length) - 1;
    bars.push({ first, range: first === last ? String(first) : `${first} to ${last}`, count });
  }
  const highest = Math.max(1, ...bars.map((bar) => bar.count));
  const create = () => {
    const bar = element("div");
    bar.append(element("i"), element("b"));
    return bar;
  };
  parent.classList.toggle("dense", bars.length > 12);
  setChildren(parent, bars, (bar) => bar.range, create, (child, bar) => {
    child.title = `staleness ${bar.range}: ${bar.count.toLocaleString("en")} gradients`;
    child.firstChild.style.setProperty("--share", bar.count / highest);
    setText(child.lastChild, String(bar.first));
  });
}
