//! A headless browser, driven over its debugging protocol. It shows pages and reports errors of their scripts.
//!
//! ```text
//!   test ──FIFO in──► chromium, descriptor 3      JSON, each message with a zero behind it
//!        ◄─FIFO out── chromium, descriptor 4
//! ```

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use base64::Engine as _;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::program::Running;
use testbed::{Program, until};

/// Largest message, in bytes. A picture of a long page has some megabytes.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Options of the browser. Its sandbox needs more rights than a test has, and the pages are our own.
const OPTIONS: &str = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run \
     --remote-debugging-pipe";

/// A browser with one page. Dropping it ends it.
pub struct Browser {
    to: File,
    from: File,
    read: Vec<u8>,
    last: u64,
    session: Option<String>,
    complaints: Vec<String>,
    // Dropped before the folder that it uses.
    _process: Running,
    _folder: TempDir,
}

/// The preferred colours of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colours {
    /// Dark text on light ground.
    Light,
    /// Light text on dark ground.
    Dark,
}

impl Browser {
    /// Starts a browser with an empty page.
    ///
    /// # Errors
    /// If there is no browser, or it does not answer.
    pub fn start() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("make a folder for the browser")?;
        let pipe = |name: &str| {
            let path = folder.path().join(name);
            let mode = rustix::fs::Mode::from_raw_mode(0o600);
            rustix::fs::mkfifoat(rustix::fs::CWD, &path, mode).context("make a FIFO")?;
            anyhow::Ok(path)
        };
        let (to, from) = (pipe("to")?, pipe("from")?);
        Program::of_package("chromium", "chromium").arg("--version").succeed()?;
        let command = format!("exec chromium {OPTIONS} --user-data-dir=\"$1\" about:blank 3<\"$2\" 4>\"$3\"");
        let process = Program::of_package("sh", "dash")
            .args(["-c", &command, "sh"])
            .arg(folder.path().join("profile"))
            .args([&to, &from])
            .start()?;
        // The shell opens the pipes in this order, and each open waits for the other side.
        let to = File::options().write(true).open(to).context("reach the browser")?;
        let from = File::open(from).context("hear the browser")?;
        let mut browser = Self {
            to,
            from,
            read: Vec::new(),
            last: 0,
            session: None,
            complaints: Vec::new(),
            _process: process,
            _folder: folder,
        };
        let target = browser.ask("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = browser.ask("Target.attachToTarget", &attach)?;
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.ask(&format!("{domain}.enable"), &json!({}))?;
        }
        browser.resize(1280, 900)?;
        Ok(browser)
    }

    /// Opens an address in the browser.
    ///
    /// # Errors
    /// If no server answers there.
    pub fn open(&mut self, url: &str) -> anyhow::Result<()> {
        let answer = self.ask("Page.navigate", &json!({ "url": url }))?;
        ensure!(answer["errorText"].is_null(), "{url}: {answer}");
        Ok(())
    }

    /// Sets the size of the window, in pixels.
    ///
    /// # Errors
    /// If the browser does not answer.
    pub fn resize(&mut self, width: u32, height: u32) -> anyhow::Result<()> {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.ask("Emulation.setDeviceMetricsOverride", &size).map(drop)
    }

    /// Sets the preferred colours of the system.
    ///
    /// # Errors
    /// If the browser does not answer.
    pub fn prefer(&mut self, colours: Colours) -> anyhow::Result<()> {
        let value = if colours == Colours::Dark { "dark" } else { "light" };
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": value }] });
        self.ask("Emulation.setEmulatedMedia", &features).map(drop)
    }

    /// Evaluates a JavaScript expression on the page.
    ///
    /// # Errors
    /// If it throws, or returns another type.
    pub fn evaluate<T: DeserializeOwned>(&mut self, expression: &str) -> anyhow::Result<T> {
        let order = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.ask("Runtime.evaluate", &order)?;
        ensure!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        serde_json::from_value(answer["result"]["value"].clone())
            .with_context(|| format!("{expression}: {answer}"))
    }

    /// Waits until an expression is true on the page.
    ///
    /// # Errors
    /// If it does not become true in time; the message has the page's text.
    pub fn until(&mut self, what: &str, expression: &str) -> anyhow::Result<()> {
        let waited = until(what, || {
            // While the page is loading, there is no answer.
            let is_so: bool = self.evaluate(&format!("Boolean({expression})")).unwrap_or(false);
            Ok(is_so.then_some(()))
        });
        waited.map_err(|error| {
            let text: String = self.evaluate("document.body.innerText").unwrap_or_default();
            error.context(format!("the page has {text:?}; it complains of {:?}", self.complaints))
        })
    }

    /// Types into the page, as a keyboard does.
    ///
    /// # Errors
    /// If the browser does not answer.
    pub fn type_text(&mut self, text: &str) -> anyhow::Result<()> {
        self.ask("Input.insertText", &json!({ "text": text })).map(drop)
    }

    /// Returns errors of scripts, and violations of the page's policy, since the last call.
    ///
    /// # Errors
    /// If the browser does not answer.
    pub fn take_complaints(&mut self) -> anyhow::Result<Vec<String>> {
        // All earlier events arrive before this answer.
        self.evaluate::<bool>("true")?;
        Ok(std::mem::take(&mut self.complaints))
    }

    /// Writes a picture of the page as PNG, at most `height_max` pixels high.
    ///
    /// # Errors
    /// If it cannot be taken or written.
    pub fn take_picture(&mut self, path: &Path, height_max: u32) -> anyhow::Result<()> {
        let [width, height]: [u32; 2] =
            self.evaluate("[innerWidth, document.documentElement.scrollHeight]")?;
        let clip = json!({ "x": 0, "y": 0, "width": width, "height": height.min(height_max), "scale": 1 });
        let order = json!({ "format": "png", "captureBeyondViewport": true, "clip": clip });
        let answer = self.ask("Page.captureScreenshot", &order)?;
        let data = answer["data"].as_str().context("the browser has no picture")?;
        let picture = base64::engine::general_purpose::STANDARD.decode(data).context("read the picture")?;
        std::fs::write(path, picture).with_context(|| format!("write {}", path.display()))
    }

    fn ask(&mut self, method: &str, parameters: &Value) -> anyhow::Result<Value> {
        self.last += 1;
        let mut order = json!({ "id": self.last, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            order["sessionId"] = session.as_str().into();
        }
        let mut bytes = order.to_string().into_bytes();
        bytes.push(0);
        self.to.write_all(&bytes).with_context(|| format!("ask the browser for {method}"))?;
        loop {
            let mut message = self.next_message().with_context(|| format!("wait for {method}"))?;
            if message["id"] == self.last {
                ensure!(message["error"].is_null(), "{method}: {}", message["error"]);
                return Ok(message["result"].take());
            }
            self.note(&message);
        }
    }

    fn note(&mut self, message: &Value) {
        let told = &message["params"];
        match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => self.complaints.push(told["exceptionDetails"].to_string()),
            Some("Runtime.consoleAPICalled") => self.complaints.push(told["args"].to_string()),
            Some("Log.entryAdded") => self.complaints.push(told["entry"].to_string()),
            _ => {}
        }
    }

    fn next_message(&mut self) -> anyhow::Result<Value> {
        let mut piece = [0; 1 << 16];
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == 0) {
                let rest = self.read.split_off(end + 1);
                let message = std::mem::replace(&mut self.read, rest);
                return serde_json::from_slice(&message[..end])
                    .context("the browser says something that is no JSON");
            }
            ensure!(self.read.len() < MESSAGE_BYTES_MAX, "the browser says too much");
            match self.from.read(&mut piece).context("hear the browser")? {
                0 => bail!("the browser has ended"),
                count => self.read.extend_from_slice(&piece[..count]),
            }
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The browser then ends its processes; the rest is killed with the first one.
        let _ = self.ask("Browser.close", &json!({}));
    }
}
