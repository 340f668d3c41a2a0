// The conversation: streaming answers, stopping and regenerating them, and how fast each was.

import { streamChat } from "./api.js";

const element = (id) => document.getElementById(id);
const optional = ["max_tokens", "seed"];
const numbers = ["temperature", "top_p", "top_k", "min_p", ...optional];

export class Chat {
  #turns = []; // {role, content, node}, oldest first
  #running = null; // AbortController of the answer that is being written
  #onFailure;

  // onFailure(error) is told what went wrong before it is shown.
  constructor(onFailure) {
    this.#onFailure = onFailure;
    element("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    element("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    element("stop").addEventListener("click", () => this.stop());
    element("regenerate").addEventListener("click", () => this.#regenerate());
    element("clear").addEventListener("click", () => this.#clear());
  }

  stop() {
    this.#running?.abort();
  }

  #send() {
    const question = element("question").value.trim();
    if (!question || this.#running) return;
    element("question").value = "";
    this.#add("user", question);
    this.#answer();
  }

  #regenerate() {
    if (this.#running) return;
    if (this.#turns.at(-1)?.role === "assistant") this.#turns.pop().node.remove();
    if (this.#turns.length) this.#answer();
  }

  #clear() {
    this.stop();
    this.#turns = [];
    element("messages").replaceChildren();
    element("status").textContent = "";
    this.#showState();
    element("question").focus();
  }

  #add(role, content) {
    const node = document.createElement("li");
    node.className = role;
    const text = document.createElement("div");
    text.className = "text";
    text.textContent = content;
    node.append(text);
    element("messages").append(node);
    node.scrollIntoView({ block: "end" });
    const turn = { role, content, node, text };
    this.#turns.push(turn);
    return turn;
  }

  async #answer() {
    const messages = this.#turns.map(({ role, content }) => ({ role, content }));
    const system = element("system").value.trim();
    if (system) messages.unshift({ role: "system", content: system });
    const turn = this.#add("assistant", "");
    const running = (this.#running = new AbortController());
    this.#showState();
    element("status").textContent = "Answering…";
    const course = { sent: performance.now(), first: null, last: null, tokens: null, reason: null };
    try {
      for await (const chunk of streamChat({ messages, ...settings() }, running.signal)) this.#take(chunk, turn, course);
      element("status").textContent = "";
    } catch (error) {
      if (running.signal.aborted) {
        course.reason = "stopped";
        element("status").textContent = "Stopped.";
      } else {
        element("status").textContent = "";
        this.#onFailure(error);
        this.#showError(turn, error.message);
      }
    }
    if (this.#running === running) this.#running = null;
    this.#showNumbers(turn, course);
    this.#showState();
  }

  #take(chunk, turn, course) {
    if (chunk.usage) course.tokens = chunk.usage.completion_tokens;
    for (const choice of chunk.choices) {
      if (choice.finish_reason) course.reason = choice.finish_reason;
      if (!choice.delta.content) continue;
      course.last = performance.now();
      course.first ??= course.last;
      turn.content += choice.delta.content;
      const list = element("messages");
      const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 80; // unless the reader has scrolled up
      turn.text.append(choice.delta.content);
      if (follows) list.scrollTop = list.scrollHeight;
    }
  }

  #showNumbers(turn, course) {
    const parts = [];
    if (course.first !== null) parts.push(`first token after ${Math.round(course.first - course.sent)} ms`);
    const seconds = (course.last - course.first) / 1000;
    if (course.tokens > 1 && seconds > 0) parts.push(`${((course.tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (course.tokens !== null) parts.push(`${course.tokens} tokens`);
    if (course.reason === "length") parts.push("cut at the longest answer");
    if (course.reason === "stopped") parts.push("stopped");
    const line = document.createElement("div");
    line.className = "quiet numbers";
    line.textContent = parts.join(" · ");
    turn.node.append(line);
    line.scrollIntoView({ block: "nearest" });
  }

  #showError(turn, message) {
    const line = document.createElement("div");
    line.className = "error";
    line.setAttribute("role", "alert");
    line.textContent = message;
    turn.node.append(line);
  }

  #showState() {
    const busy = this.#running !== null;
    const hadFocus = document.activeElement?.closest?.("#composer .buttons");
    element("send").hidden = busy;
    element("stop").hidden = !busy;
    element("regenerate").disabled = busy || this.#turns.length === 0;
    element("clear").disabled = this.#turns.length === 0;
    if (hadFocus) element(busy ? "stop" : "send").focus(); // a button that vanishes must not take the focus with it
  }
}

function settings() {
  const values = {};
  for (const name of numbers) {
    const input = element(name);
    if (input.value !== "" || !optional.includes(name)) values[name] = Number(input.value || input.defaultValue);
  }
  return values;
}
