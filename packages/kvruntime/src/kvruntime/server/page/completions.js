// One request to /v1/chat/completions, as it is streamed; its errors in words for a person.

import { events } from "./sse.js";

export class Refusal extends Error {}

let model = "";

// The name of the model that is served; requests have to say it. A server that comes back may have another.
export async function modelName(access, { signal, again = false } = {}) {
  if (model && !again) return model;
  const response = await fetch("v1/models", { headers: access.headers(), signal });
  if (response.ok) model = (await response.json()).data[0].id;
  return model;
}

// Chunks as they come. Throws a Refusal for whatever a person should read.
export async function* complete(body, access, signal) {
  let response;
  for (;;) {
    try {
      const named = { model: await modelName(access, { signal }), ...body };
      response = await fetch("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json", ...access.headers() },
        body: JSON.stringify({ ...named, stream: true, stream_options: { include_usage: true } }),
        signal,
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal("The server cannot be reached.");
    }
    if (response.status !== 401) break;
    await access.ask(signal);
  }
  if (!response.ok) throw await refusal(response);
  let isDone = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        isDone = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(`The server failed: ${chunk.error.message}`);
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Refusal) throw error;
    throw new Refusal("The connection was lost; the answer is not complete.");
  }
  if (!isDone) throw new Refusal("The connection was lost; the answer is not complete.");
}

async function refusal(response) {
  let said = "";
  try {
    said = (await response.json()).error?.message ?? "";
  } catch {
    // The status says enough.
  }
  const seconds = Number(response.headers.get("Retry-After"));
  const when = seconds ? ` Try again in ${seconds} s.` : "";
  const kinds = {
    429: "The server is busy: its queue is full.",
    503: "The server takes no requests now.",
  };
  const first = kinds[response.status] ?? `The server refused (${response.status}).`;
  const words = said ? ` It says: ${said.replace(/\.?$/, ".")}` : "";
  return new Refusal(first + words + when);
}
