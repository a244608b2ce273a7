// The list of recent requests; one opened at a time shows its waterfall.

import { byId, duration, h, number } from "./dom.js";
import { strip, waterfall } from "./waterfall.js";

const rows = new Map();  // request ID → {button, detail, drawn}: kept, so that a click or the focus is never lost
let open = null;
let last = null;

export function showRequests(state, model) {
  last = [state, model];
  const records = state.requests.filter((record) => record.model === model || !model);
  const running = records.filter((record) => record.status === "running").length;
  byId("requests-note").textContent = records.length
    ? `${number(records.length)} shown, ${number(running)} running, newest first` : "";
  const box = byId("requests");
  if (!records.length) {
    rows.clear();
    box.replaceChildren(h("p", { class: "empty" }, "None yet. What this gateway is asked shows up here: try the chat."));
    return;
  }
  if (!box.querySelector(".requests")) box.replaceChildren(titles(), h("div", { class: "requests" }));
  const shown = new Set(records.map((record) => record.request_id));
  for (const id of rows.keys()) if (!shown.has(id)) rows.delete(id);
  arrange(box.querySelector(".requests"), records.flatMap((record) => drawn(record, state.time)));
}

function titles() {
  return h("div", { class: "request titles" }, h("span", {}, "status"), h("span", { class: "id" }, "request"),
    h("span", {}, "where its time went"), h("span", { class: "num" }, "TTFT"), h("span", { class: "num" }, "total"));
}

/** Make `elements` the children, and move none that is in its place. */
function arrange(parent, elements) {
  const wanted = new Set(elements);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  elements.forEach((element, i) => {
    if (parent.children[i] !== element) parent.insertBefore(element, parent.children[i] ?? null);
  });
}

function drawn(record, now) {
  const id = record.request_id;
  if (!rows.has(id)) {
    const button = h("button", {
      class: "request", type: "button", "data-request": id,
      onclick: () => { open = open === id ? null : id; showRequests(...last); },
    });
    rows.set(id, { button, detail: h("div", { class: "detail" }), drawn: null });
  }
  const row = rows.get(id);
  const isOpen = open === id;
  const look = JSON.stringify([isOpen, record, record.status === "running" ? now : 0]);
  if (row.drawn !== look) {
    row.drawn = look;
    row.button.setAttribute("aria-expanded", String(isOpen));
    row.button.replaceChildren(
      h("span", { class: `status-${record.status}` }, record.status),
      h("span", { class: "id" }, id),
      strip(record, now),
      h("span", { class: "num" }, duration(firstToken(record))),
      h("span", { class: "num" }, duration(record.total_s ?? now - record.accepted)));
    if (isOpen) row.detail.replaceChildren(about(record), waterfall(record, now));
  }
  return isOpen ? [row.button, row.detail] : [row.button];
}

function firstToken(record) {
  // Of a request that ended otherwise, the first part of the answer is its end.
  return record.timings.first_token_s ?? (["ok", "running"].includes(record.status) ? record.first_byte_s : null);
}

function about(record) {
  const when = new Date(record.accepted * 1000).toLocaleTimeString();
  return h("div", { class: "muted" },
    `${record.request_id}: ${record.endpoint}, ${record.stream ? "streamed" : "whole"}, accepted ${when}`);
}
