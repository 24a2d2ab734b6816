// Read by Node in `.venv-clients-node`: the unmodified `openai` package for JavaScript.
//
//     node --input-type=module - http://127.0.0.1:8040 pocket < openai_calls.mjs
//
// Prints what each call gave, by its name, as JSON.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const description = "Get the weather in a city.";
const weather = { type: "function", function: { name: "get_weather", description, parameters } };
const output = JSON.stringify({ temperature: 7, sky: "cloudy" });
const user = (content) => ({ role: "user", content });
const city = z.object({ city: z.enum(["Oslo", "Rome"]) });

async function refused(call) {
  try {
    await call();
  } catch (error) {
    return [error.constructor.name, error.status, error.code, error.param];
  }
  return ["nothing was raised"];
}

async function chat() {
  const create = (fields) => client.chat.completions.create({ model, temperature: 0, ...fields });
  const told = {};
  const first = await create({ messages: [user("My name is Marisol.")] });
  const after = [user("My name is Marisol."), first.choices[0].message, user("What is my name?")];
  const second = await create({ messages: after });
  told.said = [first.choices[0].message.content, second.choices[0].message.content];
  told.cached = second.usage.prompt_tokens_details.cached_tokens;
  const count = [user("Count from 1 to 9.")];
  told.streamed = "";
  for await (const chunk of await create({ messages: count, stream: true, stream_options: { include_usage: true } })) {
    told.streamed += chunk.choices[0]?.delta.content ?? "";
    told.usage = chunk.usage?.completion_tokens ?? told.usage;
  }
  told.helper = await client.chat.completions.stream({ model, messages: count }).finalContent();
  told.many = (await create({ messages: count, n: 2, seed: 7 })).choices.length;
  const scored = await create({ messages: count, logprobs: true, top_logprobs: 2, max_completion_tokens: 3 });
  told.logprobs = scored.choices[0].logprobs.content.map((token) => token.top_logprobs.length);
  const parsed = await client.chat.completions.parse({
    model,
    messages: [user("I live in Oslo.")],
    response_format: zodResponseFormat(city, "city"),
  });
  told.parsed = city.safeParse(parsed.choices[0].message.parsed).success;
  const story = await create({ messages: [user("Tell me the story of the fox.")], stream: true });
  for await (const chunk of story) if (chunk.choices[0].delta.content) break;
  told.afterACut = (await create({ messages: [user("My name is Marisol.")] })).choices[0].message.content;
  return told;
}

async function tools() {
  const told = { ran: [] };
  const asked = { model, temperature: 0, tools: [weather] };
  const messages = [user("What is the weather in Oslo?")];
  const called = await client.chat.completions.create({ ...asked, messages });
  const message = called.choices[0].message;
  told.finish = called.choices[0].finish_reason;
  messages.push(message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: output });
  told.answer = (await client.chat.completions.create({ ...asked, messages })).choices[0].message.content;
  const run = (given) => {
    told.ran.push(given.city);
    return output;
  };
  const named = { ...weather.function, function: run, parse: JSON.parse };
  const runner = { model, temperature: 0, tools: [{ type: "function", function: named }] };
  const question = { messages: [user("What is the weather in Rome?")] };
  told.runner = await client.chat.completions.runTools({ ...runner, ...question }).finalContent();
  told.streamedRunner = await client.chat.completions.runTools({ ...runner, ...question, stream: true }).finalContent();
  return told;
}

async function responses() {
  const told = {};
  const first = await client.responses.create({ model, input: "My name is Marisol." });
  const chained = { model, input: "What is my name?", previous_response_id: first.id };
  told.said = [first.output_text, (await client.responses.create(chained)).output_text];
  told.streamed = "";
  told.kinds = [];
  for await (const event of await client.responses.create({ model, input: "Count from 1 to 9.", stream: true })) {
    if (event.type === "response.output_text.delta") told.streamed += event.delta;
    told.kinds.push(event.type);
  }
  told.kinds = [told.kinds[0], told.kinds.at(-1)];
  const tool = { type: "function", name: "get_weather", description, parameters, strict: false };
  const called = await client.responses.create({ model, input: "What is the weather in Rome?", tools: [tool] });
  const call = called.output.find((item) => item.type === "function_call");
  const input = [{ type: "function_call_output", call_id: call.call_id, output }];
  const answered = await client.responses.create({ model, input, tools: [tool], previous_response_id: called.id });
  told.call = [call.name, JSON.parse(call.arguments)];
  told.answer = answered.output_text;
  told.same = (await client.responses.retrieve(first.id)).output_text === first.output_text;
  const helper = client.responses.stream({ model, input: "My name is Ana." });
  told.helper = (await helper.finalResponse()).output_text;
  return told;
}

async function others() {
  const told = { models: [] };
  for await (const one of client.models.list()) told.models.push(one.id);
  told.models.push((await client.models.retrieve(model)).id);
  told.text = (await client.completions.create({ model, prompt: "Hello", max_tokens: 4, echo: true })).choices[0].text;
  told.streamed = "";
  for await (const chunk of await client.completions.create({ model, prompt: "Hello", max_tokens: 4, stream: true })) {
    told.streamed += chunk.choices[0].text;
  }
  const messages = [user("Hello!")];
  told.errors = {
    model: await refused(() => client.chat.completions.create({ model: "other", messages })),
    temperature: await refused(() => client.chat.completions.create({ model, messages, temperature: 3 })),
    response: await refused(() => client.responses.retrieve("resp_none")),
  };
  return told;
}

const told = { chat: await chat(), tools: await tools(), responses: await responses(), others: await others() };
console.log(JSON.stringify(told));
