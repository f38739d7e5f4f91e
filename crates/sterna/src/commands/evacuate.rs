//! `sterna evacuate`: begins to empty the host and, unless detached, follows that to its end; or prints what it would do.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use api::{Client, ClientError, ErrorCode, Evacuation, EvacuationState, NewEvacuation, WorkloadState};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::EvacuateArguments;
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format, evacuations};

/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Time between two lines about the whole, if nothing else happens.
const SUMMARY_EVERY: Duration = Duration::from_secs(10);
/// Longest wait for a daemon that does not answer: it may be restarting.
const RESTART_WAIT: Duration = Duration::from_secs(60);

pub(super) async fn run(
    client: &Client,
    arguments: EvacuateArguments,
    format: Format,
) -> Result<Exit, CommandError> {
    if arguments.status {
        let evacuation = client.evacuation().await?;
        output::print(format, &evacuation, evacuations::show)?;
        return Ok(Exit::Success);
    }
    if arguments.abort {
        client.abort_evacuation().await?;
        return follow(client, format).await;
    }
    let order = NewEvacuation {
        to: arguments.to,
        deadline_unix_ms: arguments.deadline,
        stop_rest: arguments.stop_rest,
    };
    if arguments.dry_run {
        let plan = client.plan_evacuation(&order).await?;
        output::print(format, &plan, evacuations::show)?;
        return Ok(Exit::of_evacuation(&plan));
    }
    let begun = client.evacuate(&order).await?;
    if arguments.detach {
        output::print(format, &begun, |begun| {
            format!("everything leaves for {}; see: sterna evacuate --status\n", begun.to.join(", "))
        })?;
        return Ok(Exit::Success);
    }
    follow(client, format).await
}

/// Follows the evacuation to its end. Ctrl-C ends only the watching.
async fn follow(client: &Client, format: Format) -> Result<Exit, CommandError> {
    let mut interrupt = signal(SignalKind::interrupt()).map_err(CommandError::Signals)?;
    let mut told = Told::default();
    let mut gone_since: Option<Instant> = None;
    loop {
        match client.evacuation().await {
            Ok(evacuation) => {
                gone_since = None;
                if format == Format::Text {
                    told.tell(&evacuation);
                }
                if evacuation.state == EvacuationState::Ended {
                    output::print(format, &evacuation, evacuations::show)?;
                    return Ok(Exit::of_evacuation(&evacuation));
                }
            }
            Err(source) if is_gone(&source) => {
                if gone_since.is_none() {
                    output::say("the daemon does not answer; waiting until it is back");
                }
                if gone_since.get_or_insert_with(Instant::now).elapsed() > RESTART_WAIT {
                    return Err(source.into());
                }
            }
            Err(error) => return Err(error.into()),
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            _ = interrupt.recv() => {
                output::say("the evacuation goes on; see: sterna evacuate --status; to end it: sterna evacuate --abort");
                return Ok(Exit::Interrupted);
            }
        }
    }
}

/// Returns whether the daemon may be restarting.
fn is_gone(error: &ClientError) -> bool {
    match error {
        ClientError::Unreachable { .. } | ClientError::Broken(_) => true,
        error => error.code() == Some(ErrorCode::ShuttingDown),
    }
}

/// What the user was told already.
#[derive(Default)]
struct Told {
    states: BTreeMap<(String, &'static str), WorkloadState>,
    is_warned: bool,
    summary: Option<Instant>,
}

impl Told {
    fn tell(&mut self, evacuation: &Evacuation) {
        if evacuation.state == EvacuationState::Asking && self.summary.is_none() {
            output::say("asking the other hosts what they can take");
        }
        if evacuation.misses && !std::mem::replace(&mut self.is_warned, evacuation.misses) {
            output::say(&evacuations::lost(evacuation));
        }
        for workload in &evacuation.workloads {
            let name = (workload.name.clone(), workload.kind.name());
            let before = self.states.insert(name, workload.state);
            if before != Some(workload.state) && workload.state != WorkloadState::Waiting {
                output::say(&evacuations::news(workload));
                self.summary = Some(Instant::now());
            }
        }
        if self.summary.is_none_or(|summary| summary.elapsed() >= SUMMARY_EVERY) {
            if evacuation.state == EvacuationState::Running {
                output::say(&evacuations::summary(evacuation));
            }
            self.summary = Some(Instant::now());
        }
    }
}
