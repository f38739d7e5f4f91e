//! Runs a session: carries out the decisions of [`MigrationSession`], one at a time.

#[cfg(test)]
mod tests;

use std::future::{Future, pending};
use std::ops::Deref;
use std::pin::{Pin, pin};
use std::time::Duration;

use futures_channel::mpsc::UnboundedReceiver;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use migration::session::{Action, Event, MigrationSession, Step};

use crate::ports::{Clock, Journal, Surroundings};
use crate::work::{Work, carry_out};

/// The news that reach a session during its work.
enum News {
    Wish(Event),
    Due,
    Stopping,
}

/// Runs a session to its end, or until the host stops. The next start finds its progress in the journal.
pub async fn run<J, C, S>(
    surroundings: Surroundings<J, C, S>,
    mut session: MigrationSession,
    mut work: impl Work,
    mut wishes: UnboundedReceiver<Event>,
) where
    J: Deref<Target: Journal + Sized>,
    C: Clock,
    S: Future<Output = ()>,
{
    let Surroundings { journal, clock, stopping } = surroundings;
    let mut stopping = pin!(stopping);
    loop {
        let event = if let Some(action) = session.poll_action() {
            let step = match &action {
                Action::Do(step) => Some(*step),
                _ => None,
            };
            // N.B. any other step is carried out to its end: half of it would be in no journal.
            let may_stop = step == Some(Step::Offer);
            let mut done = pin!(carry_out(&mut work, &*journal, action));
            loop {
                let due = session.poll_timeout().map(|(due, _)| due);
                let news = news(&clock, due, &mut wishes, may_stop.then_some(stopping.as_mut()));
                match select(&mut done, pin!(news)).await {
                    Either::Left((event, _)) => break event,
                    Either::Right((News::Wish(wish), _)) => session.handle_event(clock.now(), wish),
                    Either::Right((News::Due, _)) => session.handle_timeout(clock.now()),
                    Either::Right((News::Stopping, _)) => return,
                }
                if step.is_some() && session.doing() != step {
                    break None;
                }
            }
        } else if session.is_over() {
            return;
        } else {
            let (is_under_way, due) = (session.is_under_way(), session.poll_timeout().map(|(due, _)| due));
            let ends = async { if is_under_way { work.driver_ends().await } else { pending().await } };
            match select(pin!(ends), pin!(news(&clock, due, &mut wishes, Some(stopping.as_mut())))).await {
                Either::Left((Some(outcome), _)) => Some(Event::DriverEnded(outcome)),
                Either::Left((None, _)) => Some(Event::DriverLost),
                Either::Right((News::Wish(wish), _)) => Some(wish),
                Either::Right((News::Due, _)) => {
                    session.handle_timeout(clock.now());
                    None
                }
                Either::Right((News::Stopping, _)) => return,
            }
        };
        if let Some(event) = event {
            session.handle_event(clock.now(), event);
        }
    }
}

/// Resolves with the first of three: the stop of the host, an order of a user, or the session's deadline.
async fn news<S: Future<Output = ()>>(
    clock: &impl Clock,
    due: Option<Duration>,
    wishes: &mut UnboundedReceiver<Event>,
    stopping: Option<Pin<&mut S>>,
) -> News {
    let stops = async {
        match stopping {
            Some(stopping) => stopping.await,
            None => pending().await,
        }
    };
    let is_due = async {
        match due {
            Some(due) => clock.sleep_until(due).await,
            None => pending().await,
        }
    };
    let wish = async {
        match wishes.next().await {
            Some(wish) => wish,
            None => pending().await,
        }
    };
    match select(pin!(stops), select(pin!(wish), pin!(is_due))).await {
        Either::Left(((), _)) => News::Stopping,
        Either::Right((Either::Left((wish, _)), _)) => News::Wish(wish),
        Either::Right((Either::Right(((), _)), _)) => News::Due,
    }
}
