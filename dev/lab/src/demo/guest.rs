//! The two guests of the demo behind one trait: a thread of this process, and a VM in QEMU.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use testbed::nbd_client::{Address, Client, ClientOptions, StopFlag};

use super::progress::Progress;
use super::report::{Bytes, Wrong};
use crate::workload::{self, Content, Findings, Guest, GuestOptions, Mark, Step, StoppedGuest, Window};

/// A guest that works on a disk and knows its content.
pub trait DemoGuest: Sized {
    /// A moment in the guest's record.
    type Mark;
    /// The guest after its end: it still knows the disk.
    type Stopped: StoppedDemoGuest;

    /// Describes the guest's work in a few words.
    fn description(&self) -> String;

    /// Returns a mark of this moment.
    fn mark(&self) -> Self::Mark;

    /// Returns the guest's figures between two marks.
    fn between(&self, first: &Self::Mark, last: &Self::Mark) -> Felt;

    /// Returns the guest's figures between two marks, in windows of about a tenth of a second.
    fn windows(&self, first: &Self::Mark, last: &Self::Mark) -> Vec<Window>;

    /// Returns an error as soon as the guest cannot work; otherwise never ends.
    fn failure(&self) -> impl Future<Output = anyhow::Error>;

    /// Stops the guest and lets it compare its whole disk.
    ///
    /// # Errors
    /// If the guest or its disk was lost. Wrong content is not an error: the stopped guest reports it.
    fn stop_and_verify(self, progress: &mut Progress) -> impl Future<Output = anyhow::Result<Self::Stopped>>;
}

/// A guest that has compared its disk.
pub trait StoppedDemoGuest {
    /// Compares the image file with the guest's knowledge, once no daemon serves the file. Fails if it cannot be read.
    fn verify_image(
        &mut self,
        image: &Path,
        progress: &mut Progress,
    ) -> impl Future<Output = anyhow::Result<()>>;

    /// Returns all errors since the beginning.
    fn wrong(&self) -> Wrong;

    /// Returns how often the guest had to connect again.
    fn reconnects(&self) -> u64;
}

/// A guest's figures in a window of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Felt {
    /// Number of completed requests.
    pub requests: u64,
    /// Completed requests per second.
    pub iops: f64,
    /// The longest time without a completion.
    pub longest_stall: Duration,
}

/// A guest that is a thread of this process.
#[derive(Debug)]
pub struct ThreadGuest {
    guest: Guest,
    options: GuestOptions,
    block_bytes: u32,
}

impl ThreadGuest {
    /// Connects, fills the first `fill_bytes` bytes of the disk, and begins to work. `stop` ends any wait.
    pub async fn start(
        address: Address,
        fill_bytes: u64,
        block_bytes: u32,
        options: GuestOptions,
        stop: StopFlag,
        progress: &mut Progress,
    ) -> anyhow::Result<Self> {
        progress.begin("filling the disk");
        let (client, content) = with_progress(progress, fill_bytes, move |report| {
            let options = ClientOptions { stop, ..ClientOptions::default() };
            let mut client = Client::connect(&address, options).context("connect to the volume")?;
            let mut content = Content::new(client.export().size, block_bytes, FILL_SEED);
            workload::fill(&mut client, &mut content, fill_bytes, report)?;
            Ok((client, content))
        })
        .await?;
        Ok(Self { guest: Guest::start(client, content, options)?, options, block_bytes })
    }
}

/// Any number: the disk is new, so there is no older content.
const FILL_SEED: u64 = 0x5e74a;
const FAILURE_CHECK_INTERVAL: Duration = Duration::from_millis(100);

impl DemoGuest for ThreadGuest {
    type Mark = Mark;
    type Stopped = StoppedThreadGuest;

    fn description(&self) -> String {
        let reads = 100 - (self.options.mix.writes / (workload::Mix::WHOLE / 100)).min(100);
        let (block, in_flight) = (self.block_bytes / 1024, self.options.in_flight);
        let place = match self.options.working_set_bytes {
            Some(bytes) => format!(" in {}", Bytes(bytes.get())),
            None => String::new(),
        };
        format!("{block} KiB, {reads}/{} random{place}, {in_flight} outstanding", 100 - reads)
    }

    fn mark(&self) -> Mark {
        self.guest.mark()
    }

    fn between(&self, first: &Mark, last: &Mark) -> Felt {
        let summary = self.guest.between(first, last);
        Felt { requests: summary.completions, iops: summary.iops, longest_stall: summary.longest_stall }
    }

    fn windows(&self, first: &Mark, last: &Mark) -> Vec<Window> {
        self.guest.timeline(first, last).iter().map(Step::window).collect()
    }

    async fn failure(&self) -> anyhow::Error {
        loop {
            if let Some(why) = self.guest.failure() {
                return anyhow::anyhow!("the guest lost its disk: {why}");
            }
            tokio::time::sleep(FAILURE_CHECK_INTERVAL).await;
        }
    }

    async fn stop_and_verify(self, progress: &mut Progress) -> anyhow::Result<StoppedThreadGuest> {
        let stopped = tokio::task::spawn_blocking(|| self.guest.stop()).await.context("stop the guest")??;
        let disk_bytes = stopped.content.disk_bytes();
        progress.begin("verifying the whole disk");
        with_progress(progress, disk_bytes, move |report| {
            let StoppedGuest { mut client, content, mut findings, .. } = stopped;
            findings.append(workload::verify_export(&mut client, &content, report)?);
            Ok(StoppedThreadGuest { content, findings, reconnects: client.reconnects() })
        })
        .await
    }
}

/// A stopped thread guest.
#[derive(Debug)]
pub struct StoppedThreadGuest {
    content: Content,
    findings: Findings,
    reconnects: u64,
}

impl StoppedDemoGuest for StoppedThreadGuest {
    async fn verify_image(&mut self, image: &Path, progress: &mut Progress) -> anyhow::Result<()> {
        progress.begin("verifying the target's image");
        let (content, image) = (self.content.clone(), image.to_owned());
        let findings = with_progress(progress, content.disk_bytes(), move |report| {
            workload::verify_file(&image, &content, report)
        })
        .await?;
        self.findings.append(findings);
        Ok(())
    }

    fn wrong(&self) -> Wrong {
        let first = self.findings.first().iter().map(ToString::to_string).collect();
        Wrong { count: self.findings.count(), first }
    }

    fn reconnects(&self) -> u64 {
        self.reconnects
    }
}

/// Runs blocking work on a thread of its own and shows how many of `bytes_total` bytes are done.
pub(crate) async fn with_progress<T: Send + 'static>(
    progress: &mut Progress,
    bytes_total: u64,
    work: impl FnOnce(&mut dyn FnMut(u64)) -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let (sender, mut receiver) = tokio::sync::watch::channel(0_u64);
    let work = tokio::task::spawn_blocking(move || {
        work(&mut |bytes| {
            sender.send_replace(bytes);
        })
    });
    // The work drops the sender at its end.
    while receiver.changed().await.is_ok() {
        let bytes = *receiver.borrow_and_update();
        progress.advance(bytes as f64 / bytes_total.max(1) as f64);
    }
    work.await.context("the work's thread panicked")?
}
