// What an application with the `openai` package for Node does; prints what it saw as one JSON object.
// node client.mjs BASE_URL KEY MODEL
import OpenAI from "openai";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const request = {
  model,
  messages: [{ role: "user", content: "Tell me a story." }],
  temperature: 0,
  max_tokens: 40,
};

async function refusal(work) {
  try {
    await work();
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, param: error.param, code: error.code };
  }
  return null;
}

const whole = await client.chat.completions.create(request);

let streamed = "";
let finish = null;
let usage = null;
const stream = await client.chat.completions.create({
  ...request,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  finish = chunk.choices[0]?.finish_reason ?? finish;
  usage = chunk.usage ?? usage;
}

const left = await client.chat.completions.create({ ...request, max_tokens: 400, stream: true });
for await (const chunk of left) {
  void chunk;
  break; // closes the connection
}

const completion = await client.completions.create({ model, prompt: "Once", max_tokens: 5, temperature: 0, echo: true });
const models = [];
for await (const found of client.models.list()) models.push(found.id);

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    wholeUsage: whole.usage,
    streamed,
    finish,
    usage,
    completion: completion.choices[0].text,
    models,
    badRequest: await refusal(() => client.chat.completions.create({ ...request, temperature: 9 })),
    unknownModel: await refusal(() => client.chat.completions.create({ ...request, model: "gpt-5" })),
    wrongKey: await refusal(() => new OpenAI({ baseURL, apiKey: "sk-wrong", maxRetries: 0 }).models.list()),
  }),
);
