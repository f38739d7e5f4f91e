//! A VM as a guest of the demo: its figures come from its console.

use std::path::Path;
use std::time::Duration;

use testbed::nbd_client::Address;
use testbed::vm::{Tick, Verdict};

use crate::demo::{DemoGuest, Felt, Progress, StoppedDemoGuest, Wrong, with_progress};
use crate::workload::{Window, per_second, verify_digest};

pub use testbed::vm::{GuestImage, Vm, VmOptions};

const MEMORY_PAGE_BYTES: u64 = 4096;

/// Boots a VM on a volume, and waits until it has filled its disk and works. If that fails, the error
/// ends with the console's output.
pub async fn start_vm(address: &Address, options: VmOptions, progress: &mut Progress) -> anyhow::Result<Vm> {
    progress.begin("booting a VM");
    let vm = Vm::launch(address, options)?;
    vm.begins_to_work().await?;
    Ok(vm)
}

/// A moment in a VM's record: the number of ticks so far.
#[derive(Clone, Copy, Debug)]
pub struct VmMark {
    ticks: usize,
}

impl DemoGuest for Vm {
    type Mark = VmMark;
    type Stopped = StoppedVm;

    fn description(&self) -> String {
        self.options().description()
    }

    fn mark(&self) -> VmMark {
        VmMark { ticks: self.console().ticks().len() }
    }

    /// By the VM's own clock, which stops during a downtime.
    fn between(&self, first: &VmMark, last: &VmMark) -> Felt {
        between(self.console().ticks(), *first, *last)
    }

    /// By the VM's own clock, which stops during a downtime.
    fn windows(&self, first: &VmMark, last: &VmMark) -> Vec<Window> {
        windows(self.console().ticks(), *first, *last)
    }

    async fn failure(&self) -> anyhow::Error {
        Self::failure(self).await
    }

    async fn stop_and_verify(mut self, progress: &mut Progress) -> anyhow::Result<StoppedVm> {
        progress.begin(match self.options().memory_bytes {
            0 => "verifying the whole disk in the VM",
            _ => "verifying memory and disk in the VM",
        });
        let verdict = self.stop().await?;
        let wrong = Wrong { count: verdict.errors, first: self.console().wrong().to_vec() };
        Ok(StoppedVm { verdict, wrong, block_bytes: self.options().block_bytes })
    }
}

/// A VM that has compared its disk and is powered off.
#[derive(Debug)]
pub struct StoppedVm {
    verdict: Verdict,
    wrong: Wrong,
    block_bytes: u32,
}

impl StoppedVm {
    /// Returns the bytes of memory that the VM has compared.
    pub fn memory_bytes(&self) -> u64 {
        self.verdict.memory_pages * MEMORY_PAGE_BYTES
    }
}

impl StoppedDemoGuest for StoppedVm {
    async fn verify_image(&mut self, image: &Path, progress: &mut Progress) -> anyhow::Result<()> {
        progress.begin("verifying the target's image");
        let Verdict { blocks, seed, digest, .. } = self.verdict;
        let (image, block_bytes) = (image.to_owned(), self.block_bytes);
        let disk_bytes = blocks * u64::from(block_bytes);
        let findings = with_progress(progress, disk_bytes, move |report| {
            verify_digest(&image, blocks, block_bytes, seed, digest, report)
        })
        .await?;
        self.wrong.count += findings.len() as u64;
        self.wrong.first.extend(findings);
        Ok(())
    }

    fn wrong(&self) -> Wrong {
        self.wrong.clone()
    }

    /// QEMU does not report reconnects.
    fn reconnects(&self) -> u64 {
        0
    }
}

fn windows(ticks: &[Tick], first: VmMark, last: VmMark) -> Vec<Window> {
    let end = last.ticks.min(ticks.len());
    let ticks = &ticks[first.ticks.saturating_sub(1).min(end)..end];
    let window = |(before, after): (&Tick, &Tick)| Window {
        length: Duration::from_millis(after.at_ms.saturating_sub(before.at_ms)),
        requests: after.requests.saturating_sub(before.requests),
        latency_p99: (after.p99_us > 0).then(|| Duration::from_micros(after.p99_us)),
    };
    ticks.iter().zip(ticks.iter().skip(1)).map(window).collect()
}

/// Returns the VM's figures between two marks, rounded to the next tick: a tenth of a second.
fn between(ticks: &[Tick], first: VmMark, last: VmMark) -> Felt {
    // The tick after a mark also covers time before it. The window must not be empty.
    let end = last.ticks.max(first.ticks + 1).min(ticks.len().saturating_sub(1));
    let start = first.ticks.saturating_sub(1).min(end);
    let (Some(begin), Some(finish)) = (ticks.get(start), ticks.get(end)) else {
        return Felt { requests: 0, iops: 0.0, longest_stall: Duration::ZERO };
    };
    let requests = finish.requests.saturating_sub(begin.requests);
    let duration = Duration::from_millis(finish.at_ms.saturating_sub(begin.at_ms));
    let stall_us = ticks[start..=end].iter().skip(1).map(|tick| tick.stall_us).max().unwrap_or(0);
    let longest_stall = Duration::from_micros(stall_us);
    Felt { requests, iops: per_second(requests, duration), longest_stall }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tick(at_ms: u64, requests: u64, stall_us: u64) -> Tick {
        Tick { at_ms, requests, stall_us, p99_us: 700, errors: 0 }
    }

    #[test]
    fn rates_and_stalls_are_those_between_the_marks() {
        let mut ticks = vec![tick(100, 100, 50_000), tick(200, 200, 1000)];
        let first = VmMark { ticks: ticks.len() };
        ticks.extend([tick(300, 250, 2000), tick(400, 300, 1000)]);
        let last = VmMark { ticks: ticks.len() };
        let window = Window {
            length: Duration::from_millis(100),
            requests: 50,
            latency_p99: Some(Duration::from_micros(700)),
        };
        assert_eq!(windows(&ticks, first, last), [window, window]);
        // This tick began before the second mark.
        ticks.push(tick(500, 380, 70_000));
        let felt = between(&ticks, first, last);
        assert_eq!((felt.requests, felt.iops, felt.longest_stall), (180, 600.0, Duration::from_millis(70)));
    }

    #[test]
    fn a_window_shorter_than_a_tick_is_that_tick() {
        let ticks = [tick(100, 100, 1), tick(200, 150, 2)];
        let mark = VmMark { ticks: 1 };
        assert_eq!(between(&ticks, mark, mark).iops, 500.0);
        assert_eq!(between(&[], mark, mark).requests, 0);
    }
}
