// Asking the server. Only the newest question of a kind counts: older ones are given up.

const visitor = crypto.randomUUID();

export class Problem extends Error {
  constructor(status, code, message) {
    super(message);
    Object.assign(this, { status, code });
  }
}

async function read(response) {
  const content = await response.json().catch(() => ({}));
  if (!response.ok) {
    const { code = "failure", message = `the server answered with ${response.status}` } = content.error || {};
    throw new Problem(response.status, code, message);
  }
  return content;
}

async function reach(...request) {
  try {
    return await fetch(...request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "offline", "the server does not answer: is 'metadropout app' still running?");
  }
}

export const get = async (address) => read(await reach(address));

export async function sendPhoto(file, weights) {
  const address = `/api/photo?weights=${encodeURIComponent(weights)}`;
  const headers = { "Content-Type": "application/octet-stream" };
  return read(await reach(address, { method: "POST", headers, body: file }));
}

// Asks one question at a time. While one is asked, the newest of those that come waits; `ask(question)` gives
// {address, body, urgent}, or null if there is nothing to ask. An urgent one does not wait: it ends the one before.
export class Line {
  constructor(name, question, onAnswer, onProblem) {
    Object.assign(this, { name, question, onAnswer, onProblem });
    this.task = null; // {key, name}: examples that the server knows already
  }

  ask(urgent = false) {
    if (this.asking && !urgent) {
      this.again = true;
      return;
    }
    this.asking?.abort();
    this.again = false;
    const question = this.question();
    if (!question) {
      this.asking = null;
      return;
    }
    const controller = (this.asking = new AbortController());
    this.send(question, controller)
      .then((answer) => this.asking === controller && this.onAnswer(answer, question))
      .catch((error) => {
        if (this.asking === controller && error.name !== "AbortError" && error.code !== "outdated") this.onProblem(error);
      })
      .finally(() => {
        if (this.asking !== controller) return;
        this.asking = null;
        if (this.again) this.ask();
      });
  }

  async send({ address, classes, ...rest }, controller) {
    const key = JSON.stringify(classes);
    const common = { visitor: `${visitor}/${this.name}`.slice(0, 64), ...rest };
    const post = async (body) =>
      read(await reach(address, {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: controller.signal,
      }));
    let answer = null;
    if (this.task?.key === key) {
      try {
        answer = await post({ ...common, task: this.task.name });
      } catch (error) {
        if (error.code !== "forgotten" && error.code !== "weights") throw error;
      }
    }
    answer ??= await post({ ...common, classes });
    this.task = { key, name: answer.task };
    return answer;
  }
}
