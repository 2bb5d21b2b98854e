// The API's reference at /docs: Swagger UI reads /openapi.json, with the key that the page's tab has.

import { listenToTheme } from "./frame.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

function followTheme() {
  const { classList, dataset } = document.documentElement;
  classList.toggle("dark-mode", dataset.theme ? dataset.theme === "dark" : dark.matches);
}

listenToTheme(followTheme);
followTheme();
globalThis.SwaggerUIBundle({
  url: new URL("openapi.json", document.baseURI).href,
  dom_id: "#swagger-ui",
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  tryItOutEnabled: true,
  validatorUrl: null, // it would be another host
  requestInterceptor: (request) => {
    const key = sessionStorage.getItem("quire.key");
    if (key && !request.headers.Authorization) request.headers.Authorization = `Bearer ${key}`;
    return request;
  },
});
