//! Lets a guest work on any NBD export on a unix socket: `guest nbd+unix:///EXPORT?socket=PATH [SECONDS]`.
//!
//! It overwrites the disk. It prints the guest's figures second by second, then verifies the disk.

use std::time::Duration;

use anyhow::{Context, ensure};
use lab::workload::{Content, Guest, GuestOptions, fill, verify_export};
use testbed::nbd_client::{Address, Client, ClientOptions};

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let address: Address = arguments.next().context("which export?")?.parse()?;
    let seconds: u32 = arguments.next().map_or(Ok(5), |text| text.parse()).context("how many seconds?")?;

    let mut client = Client::connect(&address, ClientOptions::default())?;
    let mut content = Content::new(client.export().size, 8192, 1);
    // A used export is not zero where this guest has not written.
    let disk_bytes = content.disk_bytes();
    fill(&mut client, &mut content, disk_bytes, |_| ())?;
    let guest = Guest::start(client, content, GuestOptions::default())?;
    let first = guest.mark();
    let mut last = first.clone();
    for _ in 0..seconds {
        std::thread::sleep(Duration::from_secs(1));
        let now = guest.mark();
        let summary = guest.between(&last, &now);
        println!(
            "{:>8.0} IOPS, median {:?}, 99 % {:?}, longest stall {:?}",
            summary.iops, summary.latency_median, summary.latency_p99, summary.longest_stall
        );
        last = now;
    }
    let mut stopped = guest.stop()?;
    println!("all: {:?}", stopped.recorder.between(&first, &last));
    stopped.findings.append(verify_export(&mut stopped.client, &stopped.content, |_| ())?);
    ensure!(stopped.findings.is_empty(), "{:#?}", stopped.findings.first());
    println!("verified");
    Ok(())
}
