// Ask the search of a built site, by the worker that its pages load: node ask_search.js SITE QUERY... prints the pages of each answer, best first.
const fs = require("fs"), [site, ...queries] = process.argv.slice(2), workers = `${site}/assets/javascripts/workers/`;
let listen, answer;
Object.assign(globalThis, {self: globalThis, addEventListener: (_, f) => (listen = f), postMessage: message => answer(message)});
(0, eval)(fs.readFileSync(workers + fs.readdirSync(workers).find(name => name.endsWith(".js")), "utf8"));
const ask = (type, data) => new Promise(done => ((answer = done), listen({data: {type, data}})));

(async () => {
  const {config, docs} = JSON.parse(fs.readFileSync(`${site}/search/search_index.json`));
  await ask(0, {config, docs, options: {suggest: true}});
  for (const query of queries) {
    const {items} = (await ask(2, query)).data;
    console.log(...items.map(places => places[0].location.split("#")[0]));
  }
})();
