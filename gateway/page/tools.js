// Tools that this page offers to the model and answers by itself. Their outputs can be edited before they are sent.

/** The value of an arithmetic expression: numbers, + - * / % ^, brackets. Throws where it is none. */
export function calculate(expression) {
  const tokens = expression.match(/\d+(?:\.\d+)?(?:e[+-]?\d+)?|[-+*/%^()]|\S/gi) ?? [];
  let at = 0;
  const next = () => tokens[at];
  const take = (token) => next() === token && ++at > 0;

  function sum() {
    let value = product();
    for (;;) {
      if (take("+")) value += product();
      else if (take("-")) value -= product();
      else return value;
    }
  }
  function product() {
    let value = signed();
    for (;;) {
      if (take("*")) value *= signed();
      else if (take("/")) value /= signed();
      else if (take("%")) value %= signed();
      else return value;
    }
  }
  function signed() {
    if (take("-")) return -signed();
    if (take("+")) return signed();
    return power();
  }
  function power() {
    const base = atom();
    return take("^") ? base ** signed() : base;
  }
  function atom() {
    if (take("(")) {
      const value = sum();
      if (!take(")")) throw new Error("a bracket is not closed");
      return value;
    }
    const number = Number(next());
    if (next() === undefined || Number.isNaN(number)) throw new Error(`not a number: ${next() ?? "the end"}`);
    at += 1;
    return number;
  }

  const value = sum();
  if (at < tokens.length) throw new Error(`unexpected ${next()}`);
  return value;
}

const text = (description) => ({ type: "string", description, maxLength: 60 });
const object = (properties, required = Object.keys(properties)) => ({
  type: "object",
  properties,
  required,
  additionalProperties: false,
});

/** What a place's weather is said to be: the same each time. */
function weather(city) {
  const sum = [...city.toLowerCase()].reduce((total, letter) => total + letter.codePointAt(0), 0);
  return { temperature: (sum % 30) - 2, sky: ["cloudy", "sunny", "rainy", "windy"][sum % 4] };
}

export const BUILT_IN = [
  {
    name: "calculator",
    description: "Compute an arithmetic expression.",
    parameters: object({ expression: text("Such as (12 + 30) * 2") }),
    run: ({ expression }) => ({ result: calculate(String(expression)) }),
  },
  {
    name: "clock",
    description: "The date and time now in a time zone.",
    parameters: object({ zone: text("An IANA name such as Europe/Oslo; empty: the user's own") }, []),
    run({ zone }) {
      const timeZone = zone || Intl.DateTimeFormat().resolvedOptions().timeZone;
      const now = new Date().toLocaleString("en-GB", { timeZone, dateStyle: "full", timeStyle: "short" });
      return { zone: timeZone, now };
    },
  },
  {
    name: "get_weather",
    description: "Get the weather in a city.",
    parameters: object({ city: text("The name of the city") }),
    run: ({ city }) => weather(String(city)),
  },
];

/** What this page would answer to a call. Empty for a tool of the user's own. */
export function outputOf(name, argumentText) {
  const tool = BUILT_IN.find((one) => one.name === name);
  if (!tool) return "";
  try {
    return JSON.stringify(tool.run(JSON.parse(argumentText || "{}")));
  } catch (error) {
    return JSON.stringify({ error: error.message });
  }
}

/** A tool as the wire has it. */
export function definition({ name, description, parameters }) {
  return { type: "function", name, description, parameters };
}
