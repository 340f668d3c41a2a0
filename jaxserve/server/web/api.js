// The server's routes, by URLs relative to this page, so that it works behind any path of a proxy.

const keyName = "jaxserve-api-key";

export class UnauthorizedError extends Error {}

export function setKey(key) {
  sessionStorage.setItem(keyName, key);
}

function headers() {
  const key = sessionStorage.getItem(keyName);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function checked(response) {
  if (response.ok) return response;
  let message = `status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no error object: the status has to do
  }
  throw response.status === 401 ? new UnauthorizedError(message) : new Error(message);
}

export async function getJson(path) {
  return (await checked(await fetch(path, { headers: headers(), cache: "no-store" }))).json();
}

export async function getText(path) {
  return (await checked(await fetch(path, { headers: headers(), cache: "no-store" }))).text();
}

// Sends a chat and gives each event's object as it comes. Ends when the stream does; throws what the server says went wrong.
export async function* streamChat(body, signal) {
  const response = await checked(
    await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the answer broke off");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
