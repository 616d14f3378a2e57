// Runs named checks of one client against a server and says what each one saw, as lines of `client<TAB>check<TAB>result`.

export const url = (process.argv[2] ?? "http://127.0.0.1:8000").replace(/\/+$/, "");
export const question = "What does the PostgreSQL command VACUUM do?";

export async function runChecks(client, checks) {
  let numFailed = 0;
  for (const [name, check] of Object.entries(checks)) {
    try {
      console.log(`${client}\t${name}\tok: ${await check()}`);
    } catch (error) {
      numFailed += 1;
      console.log(`${client}\t${name}\tFAILED: ${error?.name}: ${String(error?.message).slice(0, 300)}`);
    }
  }
  process.exitCode = numFailed ? 1 : 0;
}

export function expect(holds, what) {
  if (!holds) throw new Error(`not so: ${what}`);
}

export async function untilIdle() {
  for (let look = 0; look < 50; look++) {
    const text = await (await fetch(`${url}/metrics`)).text();
    const line = text.split("\n").find((row) => row.startsWith("cloister_num_requests_running"));
    if (line && Number(line.split(" ").at(-1)) === 0) return "nothing runs any more after the client left";
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error("the request still runs");
}
