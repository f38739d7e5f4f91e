//! Decides what happens to a daemon's clients when it ends, without I/O: who adopts them, and when that is final.
//!
//! ```text
//!             Asks ───► End(PassedOn)                          Ended
//!   Serving ──┬─────────────────────────► Ending { heir } ──────────────► Delivering { heir } ──► Over: Exit
//!             └ Signal ► End(…)            │          ▲       no heir: Close │   Delivered;
//!                                          └──────────┘                      └   Failed: Close
//!                                           Gone: no heir; Signal: StopAtOnce
//! ```
//! The heir of a daemon that a service manager has started is the service manager, which keeps everything for the daemon that it
//! starts next. Otherwise it is the daemon that has asked, if there is one. Without an heir connections are closed, and clients
//! connect again. N.B. `End` is final: this process accepts no further requests, and only another process continues. Before it, a
//! daemon that has asked may go without consequences. After `Exit` this process touches no connection: it neither reads nor shuts
//! down what another one has. Until then no other daemon can serve, because this one holds the lock of the data folder.

use std::collections::VecDeque;

/// The number of a connection by which another daemon has asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Successor(pub(crate) u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Another daemon asks to replace this one.
    Asks(Successor),
    Gone(Successor),
    Signal,
    /// Nothing is served, and the restart state can be delivered.
    Ended,
    /// The heir has everything.
    Delivered,
    /// The heir did not get everything.
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Refuse(Successor, Refusal),
    /// Stop serving in order.
    End(Clients),
    /// Deliver the restart state; answered by [`Event::Delivered`] or [`Event::Failed`].
    Deliver(Heir),
    /// Close the rest: its clients have to connect again.
    Close,
    Exit,
    /// End the process without waiting for anything.
    StopAtOnce,
}

/// What happens to connections when serving ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clients {
    Closed,
    /// Connections are left open where possible, and their descriptors are given to the heir.
    PassedOn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heir {
    /// Another daemon, which waits for the connections.
    Successor(Successor),
    /// The service manager, which keeps the connections for the next daemon.
    ServiceManager,
}

/// Why another daemon is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("another daemon is already taking over from this one")]
    Taken,
    /// The service manager would take this daemon's end for that of the service.
    #[error(
        "the daemon was started by a service manager, which keeps its clients over a restart: systemctl restart sterna"
    )]
    Managed,
    /// This daemon stops for another reason than the take-over.
    #[error("the daemon is stopping; start it again when it has ended")]
    Stopping,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServiceManager {
    Present,
    Absent,
}

/// The end of one daemon.
#[derive(Debug)]
pub(crate) struct Departure {
    manager: ServiceManager,
    stage: Stage,
    actions: VecDeque<Action>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Serving,
    Ending { heir: Option<Heir> },
    Delivering { heir: Heir },
    Over,
}

impl Departure {
    pub(crate) fn new(manager: ServiceManager) -> Self {
        Self { manager, stage: Stage::Serving, actions: VecDeque::new() }
    }

    /// Returns the next action; call this until there is none.
    pub(crate) fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Handles an event. An event that does not fit the stage changes nothing.
    pub(crate) fn handle(&mut self, event: Event) {
        match (self.stage, event) {
            (Stage::Serving, Event::Asks(successor)) => match self.manager {
                ServiceManager::Present => {
                    self.actions.push_back(Action::Refuse(successor, Refusal::Managed));
                }
                ServiceManager::Absent => self.begin(Some(Heir::Successor(successor))),
            },
            (Stage::Serving, Event::Signal) => self.begin(self.manager.heir()),
            (Stage::Ending { heir: Some(Heir::Successor(_)) }, Event::Asks(other))
            | (Stage::Delivering { heir: Heir::Successor(_) }, Event::Asks(other)) => {
                self.actions.push_back(Action::Refuse(other, Refusal::Taken));
            }
            (_, Event::Asks(other)) => self.actions.push_back(Action::Refuse(other, Refusal::Stopping)),
            (Stage::Ending { heir: Some(Heir::Successor(heir)) }, Event::Gone(gone)) if heir == gone => {
                self.stage = Stage::Ending { heir: None };
            }
            (Stage::Ending { .. } | Stage::Delivering { .. }, Event::Signal) => {
                self.stage = Stage::Over;
                self.actions.push_back(Action::StopAtOnce);
            }
            (Stage::Ending { heir }, Event::Ended) => self.deliver(heir),
            (Stage::Delivering { .. }, Event::Delivered) => self.exit(),
            (Stage::Delivering { .. }, Event::Failed) => self.deliver(None),
            // Only the heir matters, and only after the end has begun.
            (_, Event::Gone(_))
            | (Stage::Over, _)
            | (Stage::Serving, Event::Ended | Event::Delivered | Event::Failed)
            | (Stage::Ending { .. }, Event::Delivered | Event::Failed)
            | (Stage::Delivering { .. }, Event::Ended) => {}
        }
    }

    fn begin(&mut self, heir: Option<Heir>) {
        let clients = if heir.is_some() { Clients::PassedOn } else { Clients::Closed };
        self.stage = Stage::Ending { heir };
        self.actions.push_back(Action::End(clients));
    }

    fn deliver(&mut self, heir: Option<Heir>) {
        match heir {
            Some(heir) => {
                self.stage = Stage::Delivering { heir };
                self.actions.push_back(Action::Deliver(heir));
            }
            None => {
                self.actions.push_back(Action::Close);
                self.exit();
            }
        }
    }

    fn exit(&mut self) {
        self.stage = Stage::Over;
        self.actions.push_back(Action::Exit);
    }
}

impl ServiceManager {
    fn heir(self) -> Option<Heir> {
        match self {
            Self::Present => Some(Heir::ServiceManager),
            Self::Absent => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FIRST: Successor = Successor(1);
    const SECOND: Successor = Successor(2);

    fn after(manager: ServiceManager, events: &[Event]) -> Vec<Action> {
        let mut departure = Departure::new(manager);
        let mut actions = Vec::new();
        for event in events {
            departure.handle(*event);
            actions.extend(std::iter::from_fn(|| departure.poll_action()));
        }
        actions
    }

    #[test]
    fn clients_are_passed_on_to_whoever_asks() {
        use Event::{Asks, Delivered, Ended};
        let expected =
            [Action::End(Clients::PassedOn), Action::Deliver(Heir::Successor(FIRST)), Action::Exit];
        assert_eq!(after(ServiceManager::Absent, &[Asks(FIRST), Ended, Delivered]), expected);
        let managed = after(ServiceManager::Present, &[Asks(FIRST), Ended, Delivered]);
        assert_eq!(managed, [Action::Refuse(FIRST, Refusal::Managed)], "it goes on serving");
        assert_eq!(
            after(ServiceManager::Absent, &[Asks(FIRST), Asks(SECOND), Ended, Delivered])[1],
            Action::Refuse(SECOND, Refusal::Taken)
        );
    }

    #[test]
    fn a_signal_has_the_service_manager_keep_clients_and_closes_them_where_there_is_none() {
        use Event::{Asks, Delivered, Ended, Signal};
        let kept = after(ServiceManager::Present, &[Signal, Ended, Delivered]);
        let expected = [Action::End(Clients::PassedOn), Action::Deliver(Heir::ServiceManager), Action::Exit];
        assert_eq!(kept, expected);
        let closed = after(ServiceManager::Absent, &[Signal, Asks(FIRST), Ended]);
        let expected = [
            Action::End(Clients::Closed),
            Action::Refuse(FIRST, Refusal::Stopping),
            Action::Close,
            Action::Exit,
        ];
        assert_eq!(closed, expected);
        assert_eq!(after(ServiceManager::Absent, &[Signal, Signal]).last(), Some(&Action::StopAtOnce));
    }

    #[test]
    fn whoever_has_asked_and_gone_is_not_waited_for() {
        use Event::{Asks, Ended, Failed, Gone};
        let gone = |event| after(ServiceManager::Absent, &[Asks(FIRST), event, Ended])[1];
        assert_eq!(gone(Gone(FIRST)), Action::Close);
        assert_eq!(gone(Gone(SECOND)), Action::Deliver(Heir::Successor(FIRST)));
        // The successor disconnects at the moment of the delivery.
        let late = after(ServiceManager::Absent, &[Asks(FIRST), Ended, Failed]);
        assert_eq!(late[2..], [Action::Close, Action::Exit]);
        let full = after(ServiceManager::Present, &[Event::Signal, Ended, Failed]);
        assert_eq!(full[2..], [Action::Close, Action::Exit]);
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let event = prop_oneof![
            Just(Event::Asks(FIRST)),
            Just(Event::Asks(SECOND)),
            Just(Event::Gone(FIRST)),
            Just(Event::Gone(SECOND)),
            Just(Event::Signal),
            Just(Event::Ended),
            Just(Event::Delivered),
            Just(Event::Failed),
        ];
        prop::collection::vec(event, 0..30)
    }

    proptest! {
        /// For any events in any order: it ends once, delivers after that, exits once and then does nothing, and never
        /// closes what an heir has.
        #[test]
        fn an_end_is_one_end(events in events(), managed in any::<bool>()) {
            let manager = if managed { ServiceManager::Present } else { ServiceManager::Absent };
            let mut departure = Departure::new(manager);
            let (mut ends, mut exits, mut delivering, mut has_ended) = (0, 0, None, false);
            for event in events {
                // Events that can only follow an action.
                let is_possible = match event {
                    Event::Ended => ends == 1 && !std::mem::replace(&mut has_ended, true),
                    Event::Delivered | Event::Failed => delivering.is_some(),
                    _ => true,
                };
                if !is_possible {
                    continue;
                }
                departure.handle(event);
                let answered = matches!(event, Event::Delivered | Event::Failed);
                let before = if answered { delivering.take() } else { None };
                while let Some(action) = departure.poll_action() {
                    match action {
                        Action::End(_) => ends += 1,
                        Action::Deliver(heir) => {
                            prop_assert!(has_ended && exits == 0);
                            prop_assert_ne!(before, Some(heir), "nobody is tried twice");
                            delivering = Some(heir);
                        }
                        Action::Close => prop_assert!(has_ended && event != Event::Delivered),
                        Action::Exit | Action::StopAtOnce => exits += 1,
                        Action::Refuse(..) => {}
                    }
                    prop_assert!(ends <= 1 && exits <= 1);
                }
            }
        }
    }
}
