// The page as a whole: its two tabs, its colours, the API key.

import { getJson, setKey, UnauthorizedError } from "./api.js";
import { Chat } from "./chat.js";
import { Live } from "./live.js";

const element = (id) => document.getElementById(id);
const tabs = ["chat", "live"];
const themes = ["auto", "light", "dark"];

function onFailure(error) {
  if (error instanceof UnauthorizedError && element("key-form").hidden) {
    element("key-form").hidden = false;
    element("key").focus();
  }
}

new Chat(onFailure);
const live = new Live(onFailure);

async function showModel() {
  try {
    element("model").textContent = (await getJson("v1/models")).data[0].id;
  } catch (error) {
    element("model").textContent = error.message;
    onFailure(error);
  }
}

function showTab(name) {
  for (const tab of tabs) {
    const chosen = tab === name;
    element(`page-${tab}`).hidden = !chosen;
    element(`tab-${tab}`).setAttribute("aria-selected", String(chosen));
    element(`tab-${tab}`).tabIndex = chosen ? 0 : -1;
  }
  if (name === "live" && !document.hidden) live.start();
  else live.pause();
  history.replaceState(null, "", `#${name}`);
}

function shownTab() {
  return tabs.find((tab) => !element(`page-${tab}`).hidden);
}

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  element("theme").textContent = theme[0].toUpperCase() + theme.slice(1);
  localStorage.setItem("jaxserve-theme", theme);
}

for (const [index, tab] of tabs.entries()) {
  element(`tab-${tab}`).addEventListener("click", () => showTab(tab));
  element(`tab-${tab}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    showTab(next);
    element(`tab-${next}`).focus();
  });
}
document.addEventListener("visibilitychange", () => showTab(shownTab())); // no polling for a page that nobody sees
element("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme ?? "auto";
  showTheme(themes[(themes.indexOf(theme) + 1) % themes.length]);
});
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(element("key").value);
  element("key-form").hidden = true;
  showModel();
  element("question").focus();
});

const kept = localStorage.getItem("jaxserve-theme");
showTheme(themes.includes(kept) ? kept : "auto");
showTab(location.hash === "#live" ? "live" : "chat");
showModel();
if (shownTab() === "chat") element("question").focus();
