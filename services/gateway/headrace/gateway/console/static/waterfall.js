// Where one request spent its time, from the timings that its stages reported.

import { bytes, duration, h, number, rate } from "./dom.js";

/**
 * Return [{what, tone, start, length}] in seconds from acceptance; each ends before the next begins. All were measured
 * by a stage, or lie between two moments that were, but for those of the tone "other": nobody knows what was there.
 */
export function spans(record, now) {
  const t = record.timings;
  const total = record.total_s ?? t.total_s ?? Math.max(0, now - record.accepted);
  const found = [];
  let at = 0;
  const add = (what, tone, length, until = total) => {
    const clipped = Math.min(length ?? 0, until - at);
    if (clipped > 0) {
      found.push({ what, tone, start: at, length: clipped });
      at += clipped;
    }
  };
  const first = t.first_token_s ?? total;
  add("render queue", "queue", t.render_queue_s, first);
  add("render", "render", t.render_s, first);
  if (t.first_token_s != null) {
    // Decode's own times end at the first token; what they leave over lies before them.
    const own = [t.decode_queue_s, t.prefill_wait_s, t.first_step_s].reduce((sum, length) => sum + (length ?? 0), 0);
    add("not measured", "other", first - own - at, first);
  }
  add("decode queue", "queue", t.decode_queue_s, first);
  const before = at;
  add("prefill queue", "queue", t.prefill_queue_s, first);
  add("prefill", "prefill", t.prefill_s, first);
  const isLocal = t.prefill_mode === "local";
  add(isLocal ? "before the engine" : "to prefill and back", "first", (t.prefill_wait_s ?? 0) - (at - before), first);
  add("KV transfer", "kv", t.kv_transfer_s, first);
  if (t.first_token_s != null) {
    const step = (t.first_step_s ?? 0) - (t.kv_transfer_s ?? 0);
    add(isLocal ? "prefill, first step" : "first step", isLocal ? "prefill" : "first", step, first);
    add("not measured", "other", first - at, first);
    add("decode", "decode", t.decode_s);
    add("derender, end", "derender", (t.total_s ?? total) - at);
  }
  const whole = record.total_s ?? t.total_s;
  if (whole != null) {
    const named = t.total_s == null ? "not reported" : "delivery";
    add(named, t.total_s == null ? "other" : "gateway", total - at);
  } else {
    add("running", "other", total - at);
  }
  return { spans: found, total };
}

/** The share of a request's time that its stages explain. */
export function explained({ spans: found, total }) {
  const named = found.filter((span) => span.tone !== "other");
  return total > 0 ? named.reduce((sum, span) => sum + span.length, 0) / total : 1;
}

/** All of it in one thin line. */
export function strip(record, now) {
  const { spans: found, total } = spans(record, now);
  return h("span", { class: "strip" }, found.map((span) => {
    const part = h("i", { class: `tone-${span.tone}`, title: `${span.what} ${duration(span.length)}` });
    part.style.width = `${(100 * span.length) / (total || 1)}%`;
    return part;
  }));
}

/** A line a stage, with what else is known. */
export function waterfall(record, now) {
  const all = spans(record, now);
  const rows = all.spans.flatMap((span) => {
    const mark = h("i", { class: `tone-${span.tone}` });
    mark.style.left = `${(100 * span.start) / (all.total || 1)}%`;
    mark.style.width = `${(100 * span.length) / (all.total || 1)}%`;
    return [h("span", {}, span.what), h("span", { class: "lane" }, mark), h("span", { class: "num" }, duration(span.length))];
  });
  return h("div", {}, h("div", { class: "waterfall" }, rows), facts(record, all));
}

function facts(record, all) {
  const t = record.timings;
  const fact = (what, value) => value != null && h("span", {}, `${what} `, h("b", {}, value));
  const speed = t.kv_transfer_bytes && t.kv_transfer_s ? `, ${rate(t.kv_transfer_bytes / t.kv_transfer_s)}` : "";
  const workers = Object.values(t.workers ?? {});
  return h("div", { class: "facts" },
    fact("total", duration(all.total)),
    fact("first token", t.first_token_s == null ? null : duration(t.first_token_s)),
    fact("tokens", t.num_prompt_token_ids == null ? null : `${number(t.num_prompt_token_ids)} in, ${number(t.num_output_token_ids)} out`),
    fact("prefill", t.prefill_mode),
    fact("KV moved", t.kv_transfer_bytes == null ? null : `${bytes(t.kv_transfer_bytes)}${speed}`),
    fact("not computed by decode", t.num_cached_token_ids ? `${number(t.num_cached_token_ids)} tokens` : null),
    fact("derender CPU", t.derender_s == null ? null : duration(t.derender_s)),
    fact("explained", record.status === "running" ? null : `${(100 * explained(all)).toFixed(0)} %`),
    fact("answered", record.http_status == null ? null : `HTTP ${record.http_status}`),
    fact("by", workers.length ? workers.join(" → ") : null));
}
