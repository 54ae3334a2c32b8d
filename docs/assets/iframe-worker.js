/* Search works in pages that are opened as files: browsers start no worker from a file, so its script runs in a hidden frame instead.
   The search script looks for the name IFrameWorker. Both sides talk by messages, as they would with a worker. */
"use strict"
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      const script = frame.contentDocument.createElement("script")
      script.src = new URL(url, location.href).href
      this.ready = new Promise((resolve) => script.addEventListener("load", resolve))
      this.inside = frame.contentWindow
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      frame.contentDocument.body.append(script)
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
