// A few numbers over the last minutes, as seen since this page was opened.

import { duration, h, number, percentile } from "./dom.js";

const KEPT_S = 180;
const SVG = "http://www.w3.org/2000/svg";
const history = new Map();  // model → [{time, running, waiting, prefilled}]

export function trends(state, workers, model) {
  const all = history.get(model) ?? [];
  history.set(model, all);
  const decode = workers.filter((beat) => beat.role === "decode");
  const running = decode.reduce((sum, beat) => sum + beat.num_running, 0);
  const waiting = (state.queues ?? []).filter((row) => row.model === model)
    .reduce((sum, row) => sum + row.num_waiting, 0);
  const prefilled = workers.reduce((sum, beat) => sum + beat.num_prefilled, 0);
  const latest = all[all.length - 1];
  if (!latest || state.time > latest.time) all.push({ time: state.time, running, waiting, prefilled });
  while (all.length && all[0].time < state.time - KEPT_S) all.shift();

  const ended = state.requests.filter((record) => record.model === model && record.status === "ok");
  const ttfts = ended.map((record) => record.timings.first_token_s).filter((value) => value != null);
  const speeds = ended.map((record) => record.timings)
    .filter((t) => t.num_output_token_ids > 1 && t.decode_s).map((t) => t.decode_s / (t.num_output_token_ids - 1));
  const rates = all.slice(1).map((entry, i) =>
    Math.max(0, entry.prefilled - all[i].prefilled) / (entry.time - all[i].time || 1));
  const box = h("div", { class: "trends" },
    trend("running in decode", number(running), all.map((entry) => entry.running)),
    trend("waiting in queues", state.queues ? number(waiting) : "–", all.map((entry) => entry.waiting)),
    trend("prompts a second", number(mean(rates.slice(-5)), 1), rates),
    trend("TTFT, median", duration(percentile(ttfts, 0.5)), [...ttfts].reverse()),
    trend("ITL, median", duration(percentile(speeds, 0.5)), [...speeds].reverse()));
  box.style.gridArea = "trends";
  return box;
}

const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0);

function trend(what, value, values) {
  const top = Math.max(...values, 1e-9);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 26");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "polyline");
  const step = 100 / Math.max(1, values.length - 1);
  line.setAttribute("points", values.map((v, i) => `${(i * step).toFixed(1)},${(24 - (22 * v) / top).toFixed(1)}`).join(" "));
  svg.append(line);
  return h("div", { class: "trend" }, h("div", { class: "value" }, value), h("div", { class: "what" }, what), svg);
}
