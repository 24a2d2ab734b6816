// Read by Node in `.venv-clients-node`: the Vercel AI SDK, with its provider for servers like OpenAI's (Chat
// Completions and Completions) and the one for OpenAI itself (Responses).
//
//     node --input-type=module - http://127.0.0.1:8040 pocket < ai_sdk.mjs
//
// Prints what each call gave, by its name, as JSON.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const settings = { name: "holdfast", baseURL: `${url}/v1`, apiKey: "none" };
const compatible = createOpenAICompatible({ ...settings, includeUsage: true, supportsStructuredOutputs: true });
const openai = createOpenAI(settings);
const schema = z.object({ city: z.enum(["Oslo", "Rome"]) });
const user = (content) => ({ role: "user", content });

// An agent with a tool: a turn, one that is streamed and calls the tool, one that remembers both, and a type.
async function agent(named) {
  const ran = [];
  const get_weather = tool({
    description: "Get the weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      ran.push(city);
      return JSON.stringify({ temperature: 7, sky: "cloudy" });
    },
  });
  const asked = { model: named, temperature: 0, maxRetries: 0, tools: { get_weather }, stopWhen: stepCountIs(4) };
  const messages = [user("My name is Marisol.")];
  const first = await generateText({ ...asked, messages });
  messages.push(...first.response.messages, user("What is the weather in Rome?"));
  const second = streamText({ ...asked, messages });
  const pieces = [];
  for await (const piece of second.textStream) pieces.push(piece);
  messages.push(...(await second.response).messages, user("What is the weather in Oslo?"));
  const third = await generateText({ ...asked, messages });
  messages.push(...third.response.messages, user("What is my name?"));
  const last = await generateText({ ...asked, messages });
  const typed = { model: named, temperature: 0, maxRetries: 0, prompt: "I live in Oslo." };
  const { output } = await generateText({ ...typed, output: Output.object({ schema }) });
  const partial = streamText({ ...typed, output: Output.object({ schema }) });
  let grown;
  for await (const part of partial.partialOutputStream) grown = part;
  return {
    said: [first.text, pieces.join(""), third.text, last.text],
    pieces: pieces.length,
    ran,
    steps: (await second.steps).length,
    finish: last.finishReason,
    usage: last.usage,
    streamUsage: (await second.usage).outputTokens,
    typed: [schema.safeParse(output).success, schema.safeParse(grown).success],
  };
}

async function others() {
  const completed = await generateText({
    model: compatible.completionModel(model),
    prompt: "Hello",
    maxOutputTokens: 4,
    maxRetries: 0,
  });
  let error = "nothing was raised";
  try {
    await generateText({ model: compatible("other"), prompt: "Hello!", maxRetries: 0 });
  } catch (raised) {
    error = [APICallError.isInstance(raised), raised.statusCode, raised.isRetryable];
  }
  const system = "The user's dog is called Tamu.";
  const dog = await generateText({ model: compatible(model), system, prompt: "What is my dog called?", maxRetries: 0 });
  return { completed: completed.usage.outputTokens, error, dog: dog.text };
}

const told = { chat: await agent(compatible(model)), strict: await agent(openai.chat(model)) };
told.responses = await agent(openai.responses(model));
told.others = await others();
console.log(JSON.stringify(told));
