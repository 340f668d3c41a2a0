// The live page: the server's metrics every second, as small charts.

import { getText } from "./api.js";

const kept = 120; // seconds
const charts = [
  { id: "running", title: "Answers being generated", unit: "", digits: 0, of: (now) => now.num_requests_running },
  { id: "waiting", title: "Waiting", unit: "", digits: 0, of: (now) => now.num_requests_waiting },
  { id: "tokens", title: "Tokens generated", unit: "tokens/s", digits: 0, of: rate("generation_tokens_total") },
  { id: "prompt", title: "Prompt tokens", unit: "tokens/s", digits: 0, of: rate("prompt_tokens_total") },
  { id: "ttft", title: "Time to first token", unit: "ms", digits: 0, of: mean("time_to_first_token_seconds") },
  { id: "tpot", title: "Time per output token", unit: "ms", digits: 1, of: mean("inter_token_latency_seconds") },
  { id: "pages", title: "KV pages in use", unit: "%", digits: 0, of: (now) => 100 * now.kv_cache_usage_perc, top: 100 },
  { id: "step", title: "Step", unit: "ms", digits: 1, of: mean("engine_step_seconds") },
];

function rate(name) {
  return (now, before, seconds) => before && Math.max(0, now[name] - before[name]) / seconds;
}

function mean(name) {
  return (now, before) => {
    const count = before && now[`${name}_count`] - before[`${name}_count`];
    return count > 0 ? (1000 * (now[`${name}_sum`] - before[`${name}_sum`])) / count : null;
  };
}

// Prometheus' text format: the metrics without labels, by their names without the prefix.
export function parseMetrics(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const match = /^jaxserve:([a-z_]+) (\S+)$/.exec(line);
    if (match) values[match[1]] = Number(match[2]);
  }
  return values;
}

export class Live {
  #timer = null;
  #before = null;
  #time = 0;
  #history = Object.fromEntries(charts.map(({ id }) => [id, []]));
  #onFailure;

  constructor(onFailure) {
    this.#onFailure = onFailure;
    const make = (chart) => {
      const node = document.createElement("section");
      node.className = "chart";
      node.id = `chart-${chart.id}`;
      node.innerHTML =
        `<h2>${chart.title}</h2><div class="now"><b>–</b> <small>${chart.unit}</small></div>` +
        `<svg viewBox="0 0 ${kept - 1} 40" preserveAspectRatio="none" role="img"><line class="base" x1="0" x2="${kept}" y1="39.5" y2="39.5"/></svg>` +
        `<div class="scale"><span>2 minutes ago</span><span class="top"></span><span>now</span></div>`;
      return node;
    };
    document.getElementById("charts").replaceChildren(...charts.map(make));
  }

  start() {
    if (this.#timer === null) {
      this.#poll();
      this.#timer = setInterval(() => this.#poll(), 1000);
    }
  }

  pause() {
    clearInterval(this.#timer);
    this.#timer = null;
    this.#before = null; // the next rates are not over the pause
  }

  async #poll() {
    const error = document.getElementById("live-error");
    try {
      const now = parseMetrics(await getText("metrics"));
      const time = performance.now();
      error.hidden = true;
      if (!("num_requests_running" in now)) throw new Error("the model is still loading");
      for (const chart of charts) this.#add(chart, chart.of(now, this.#before, (time - this.#time) / 1000));
      this.#before = now;
      this.#time = time;
    } catch (failure) {
      error.textContent = failure.message;
      error.hidden = false;
      this.#before = null;
      this.#onFailure(failure);
    }
  }

  #add(chart, value) {
    const history = this.#history[chart.id];
    history.push(value ?? null);
    if (history.length > kept) history.shift();
    const node = document.getElementById(`chart-${chart.id}`);
    const shown = history.findLast((entry) => entry !== null);
    node.querySelector("b").textContent = shown === undefined ? "–" : shown.toFixed(chart.digits);
    const highest = Math.max(...history.map((entry) => entry ?? 0));
    const top = chart.top ?? Math.max(highest, 1e-9);
    node.querySelector(".top").textContent = highest > 0 ? `highest ${highest.toFixed(chart.digits)}` : "";
    const svg = node.querySelector("svg");
    svg.querySelectorAll("polyline").forEach((line) => line.remove());
    for (const points of runs(history)) {
      const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
      const place = ([index, entry]) => `${kept - history.length + index},${(39 - 37 * Math.min(1, entry / top)).toFixed(2)}`;
      if (points.length === 1) points.push(points[0]); // a dot, by the line's round ends
      line.setAttribute("points", points.map(place).join(" "));
      svg.append(line);
    }
    svg.setAttribute("aria-label", `${chart.title}: ${node.querySelector("b").textContent} ${chart.unit}`);
  }
}

// The pieces of a history that have values, as [index, value] pairs: nothing is drawn where nothing was measured.
function runs(history) {
  const pieces = [];
  history.forEach((entry, index) => {
    if (entry === null) return;
    if (index > 0 && history[index - 1] !== null) pieces.at(-1).push([index, entry]);
    else pieces.push([[index, entry]]);
  });
  return pieces;
}
