//! `sterna top`: shows the host on the screen, or prints it once as text or JSON.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use api::{Client, ClientError, Overview};
use crossterm::cursor::MoveTo;
use crossterm::event::{Event, EventStream};
use crossterm::terminal::{Clear, ClearType};
use futures_util::StreamExt as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use crate::args::TopArguments;
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format, with_causes};
use crate::top::sheet::{self, Cell, Sheet, Side};
use crate::top::words::clean;
use crate::top::{Next, Top, draw};

/// Time between two requests.
const INTERVAL: Duration = Duration::from_secs(1);
/// Longest time for an answer. A slower daemon counts as not answering.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Largest number of answers that wait to be drawn.
const ANSWERS_MAX: usize = 2;

pub(super) async fn run(client: &Client, order: &TopArguments, format: Format) -> Result<Exit, CommandError> {
    if order.once || format == Format::Json {
        let overview = seen_twice(client).await?;
        output::print(format, &overview, as_text)?;
        return Ok(Exit::Success);
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(CommandError::NoTerminal);
    }
    // The client's remarks about late answers would disturb the screen.
    let client = client.never_late();
    let mut top = Top::new();
    // A permanent error of the first request is printed as by other commands.
    match ask(&client).await {
        Ok(overview) => top.see(overview),
        Err(error) if is_for_good(&error) => return Err(error.into()),
        Err(error) => top.lose(with_causes(&error), Instant::now()),
    }
    let mut terminal = ratatui::try_init().inspect_err(|_| ratatui::restore())?;
    let shown = watch(&mut terminal, client, &mut top).await;
    // Some terminals keep lines of a resized screen; this clears them.
    let _ = crossterm::execute!(std::io::stdout(), Clear(ClearType::All), MoveTo(0, 0));
    let restored = ratatui::try_restore();
    shown?;
    restored?;
    Ok(Exit::Success)
}

/// Shows the host until the user or a signal ends it.
async fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    client: Client,
    top: &mut Top,
) -> Result<(), CommandError> {
    let mut ends = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()]
        .map(|kind| signal(kind).map_err(CommandError::Signals));
    let [terminate, interrupt, hang_up] = &mut ends;
    let (Ok(terminate), Ok(interrupt), Ok(hang_up)) = (terminate, interrupt, hang_up) else {
        return ends.into_iter().try_for_each(|signal| signal.map(drop));
    };
    let (answers, mut answered) = mpsc::channel(ANSWERS_MAX);
    let asking = tokio::spawn(async move {
        let mut turns = tokio::time::interval(INTERVAL);
        turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            turns.tick().await;
            if answers.send(ask(&client).await).await.is_err() {
                return;
            }
        }
    });
    let mut events = EventStream::new();
    let result = loop {
        if let Err(error) = terminal.draw(|frame| draw::draw(frame, top, Instant::now())) {
            break Err(error.into());
        }
        tokio::select! {
            answer = answered.recv() => match answer {
                Some(Ok(overview)) => top.see(overview),
                Some(Err(error)) => top.lose(with_causes(&error), Instant::now()),
                None => break Ok(()),
            },
            event = events.next() => match event {
                Some(Ok(Event::Key(key))) => if top.press(key) == Next::Quit { break Ok(()) },
                // The next drawing uses the new size.
                Some(Ok(_)) => {}
                // The terminal was closed.
                Some(Err(_)) | None => break Ok(()),
            },
            _ = terminate.recv() => break Ok(()),
            _ = interrupt.recv() => break Ok(()),
            _ = hang_up.recv() => break Ok(()),
        }
    };
    asking.abort();
    result
}

async fn ask(client: &Client) -> Result<Overview, ClientError> {
    tokio::time::timeout(ANSWER_MAX, client.overview()).await.unwrap_or_else(|_| {
        let address = client.address();
        Err(ClientError::Unreachable { address, source: std::io::ErrorKind::TimedOut.into() })
    })
}

/// Returns an overview with rates. Rates need two overviews, so it asks twice if there is no recent one.
async fn seen_twice(client: &Client) -> Result<Overview, ClientError> {
    let first = client.overview().await?;
    let is_told = |overview: &Overview| {
        let mut served = overview.volumes.iter().filter(|volume| volume.state == api::VolumeState::Serving);
        served.all(|volume| volume.activity.is_some())
    };
    if is_told(&first) {
        return Ok(first);
    }
    tokio::time::sleep(INTERVAL).await;
    client.overview().await
}

fn is_for_good(error: &ClientError) -> bool {
    match error {
        ClientError::Unreachable { source, .. } => source.kind() == std::io::ErrorKind::PermissionDenied,
        // The daemon is too old, or it is another program.
        ClientError::Malformed { .. } | ClientError::TooLarge => true,
        ClientError::Refused(detail) => detail.code != api::ErrorCode::ShuttingDown,
        ClientError::Broken(_) => false,
    }
}

/// Returns everything, one table below the other.
fn as_text(overview: &Overview) -> String {
    let mut volumes: Vec<_> = overview.volumes.iter().collect();
    sheet::sort(&mut volumes, sheet::Order::Name, false);
    let mut text = format!(
        "{} {}, up {}, {}\n",
        clean(&overview.name),
        overview.host.version,
        console::units::duration(
            overview.taken_unix_ms.saturating_sub(overview.host.started_unix_ms) as f64 / 1000.0
        ),
        if overview.readiness.ready { "ready" } else { "not ready" },
    );
    for problem in &overview.readiness.problems {
        let named = problem.name.as_ref().map(|name| format!(" {name}")).unwrap_or_default();
        text += &format!("{}{named}: {}\n", problem.part.name(), clean(&problem.message));
    }
    for part in [
        sheet::vms(overview),
        sheet::standbys(&overview.standbys),
        sheet::migrations(&sheet::under_way(overview)),
        sheet::volumes(&volumes),
        sheet::stores(&overview.stores.iter().collect::<Vec<_>>()),
        sheet::hosts(&overview.peers.iter().collect::<Vec<_>>()),
    ] {
        text += "\n";
        text += &table(&part);
    }
    text
}

fn table(sheet: &Sheet) -> String {
    if sheet.rows.is_empty() {
        return format!("{}\n", sheet.when_empty);
    }
    let titles: Vec<&str> = sheet.columns.iter().map(|column| column.title).collect();
    let figures = (0..).zip(&sheet.columns).filter(|(_, column)| column.side == Side::Right);
    let mut table = output::table(&titles, &figures.map(|(index, _)| index).collect::<Vec<_>>());
    for row in &sheet.rows {
        table.add_row(row.iter().map(|Cell { text, .. }| clean(text)));
    }
    output::lines(&table)
}
