// The viewer's batches with their progress; nothing at all where this gateway has none.

import { askJson } from "./api.js";
import { byId, h, number } from "./dom.js";

const EVERY_MS = 5000;
const HOPELESS = [404, 405, 501];
let next = 0;
let isOff = false;

export async function showBatches() {
  if (isOff || performance.now() < next) return;
  next = performance.now() + EVERY_MS;
  let found;
  try {
    found = (await askJson("/v1/batches?limit=20")).data ?? [];
  } catch (error) {
    isOff = HOPELESS.includes(error.status);  // else it may be there next time
    byId("batches-card").hidden ||= isOff;
    return;
  }
  byId("batches-card").hidden = !found.length;
  byId("batches").replaceChildren(...found.map(row));
}

function row(batch) {
  const { total = 0, completed = 0, failed = 0 } = batch.request_counts ?? {};
  const part = (count, kind) => {
    const fill = h("i", { class: kind });
    fill.style.width = `${total ? (100 * count) / total : 0}%`;
    return fill;
  };
  const counts = `${number(completed)} of ${number(total)}${failed ? `, ${number(failed)} failed` : ""}`;
  return h("div", { class: "batch" },
    h("span", { class: "id", title: batch.id }, batch.id),
    h("span", { class: "muted" }, batch.status),
    h("div", { class: "bar parts", title: counts }, part(completed, "done"), part(failed, "failed")),
    h("span", {}, counts));
}
