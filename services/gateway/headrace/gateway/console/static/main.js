// Asks for the state while somebody looks, and gives it to the parts of the page.

import { askJson, key, RefusedError, setKey } from "./api.js";
import { showBatches } from "./batches.js";
import { startChat } from "./chat.js";
import { byId, h } from "./dom.js";
import { showPipeline } from "./pipeline.js";
import { showRequests } from "./requests.js";

const EVERY_MS = 1000;
const THEME = "headrace-theme";
let model = "";
let timer = 0;

async function refresh() {
  clearTimeout(timer);
  if (document.hidden) return;  // asked again when it is looked at
  try {
    const state = await askJson("/console/state");
    show(state);
    await showBatches();
  } catch (error) {
    if (error instanceof RefusedError) {
      askForKey(error.message);
      return;  // goes on with the key
    }
    health("gateway away", "bad");
    trouble(`No answer from the gateway: ${error.message}`);
  }
  timer = setTimeout(refresh, EVERY_MS);
}

function show(state) {
  chooseModel(Object.keys(state.models));
  byId("key").hidden = !state.needs_key;
  trouble(state.trouble);
  const stages = state.models[model];
  if (state.trouble) health("broker away", "bad");
  else if (!stages) health("no model served", "warn");
  else if (!stages.ready) health(`not ready: ${stages.missing.join(", ") || "contracts differ"}`, "warn");
  else health(stages.prefill === "remote" ? "ready, remote prefill" : "ready, local prefill", "good");
  showPipeline(state, model);
  showRequests(state, model);
  byId("about").textContent = `headrace ${state.version}, requests of ${state.tenant}`;
}

function chooseModel(names) {
  const select = byId("model");
  const shown = Array.from(select.options, (option) => option.value);
  if (names.join("\n") !== shown.join("\n")) {
    select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    if (names.includes(model)) select.value = model;
  }
  model = select.value;
}

function health(text, kind) {
  byId("health").textContent = text;
  byId("health").className = `pill ${kind}`;
}

function trouble(text) {
  byId("trouble").hidden = !text;
  byId("trouble").textContent = text;
}

function askForKey(why) {
  health("API key needed", "warn");
  byId("key").hidden = false;
  byId("key-text").textContent = key() ? `Not a good key: ${why}.`
    : "This gateway asks for an API key. It stays in this tab, and is gone when you close it.";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key").addEventListener("click", () => byId("key-dialog").showModal());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key-input").value.trim());
  byId("key-input").value = "";
  byId("key-dialog").close();
  refresh();
});
byId("key-forget").addEventListener("click", () => {
  setKey("");
  location.reload();  // nothing that the key let through stays on the page
});
byId("model").addEventListener("change", () => {
  model = byId("model").value;
  refresh();
});

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}
byId("theme").addEventListener("click", () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
  setTheme(isDark ? "light" : "dark");
  localStorage.setItem(THEME, isDark ? "light" : "dark");
});
setTheme(localStorage.getItem(THEME));
document.addEventListener("visibilitychange", refresh);
startChat(() => model, askForKey);
refresh();
