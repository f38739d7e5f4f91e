//! Tells administrators by itself what they would have to ask for otherwise: problems of the host, migrations that failed.
//!
//! ```text
//!   health, ended migrations ─► Watch, Ends: what has begun, ended, happened ─► Post, one a destination ─► program, webhook
//!                                  └──────────── notices.json in the data folder ───────────┘
//! ```
//! What is told is on disk before it is sent, so a restart loses nothing and tells little twice. Nothing waits for a destination but
//! its own task.

mod keeping;
mod migrations;
mod post;
mod program;
mod watch;
mod webhook;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::{Notice, NoticeDestination, NoticeEvent, NoticeLevel, Part, Problem, Readiness};
use tokio::sync::Notify;

use self::keeping::Kept;
use self::migrations::SeenMigrations;
use self::post::Post;
use self::watch::{News, Subject, Watch};
use self::webhook::Webhook;
use crate::config::NotifyConfig;
use crate::error::RequestError;
use crate::host::{Description, Parts, Stopping};
use crate::journal::now_unix_ms;

/// Time between two looks at the host. Disks and hypervisors are not asked more often anyway.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The most bytes of a message. A system takes 128 KiB for one variable of a program.
const MESSAGE_BYTES_MAX: usize = 8 << 10;
/// The longest that a destination may take for one notice.
const DELIVERY_MAX: Duration = Duration::from_secs(30);

/// The notices of this host.
pub(crate) struct Notices {
    description: Arc<Description>,
    stopping: Stopping,
    tells_warnings: bool,
    destinations: Vec<Destination>,
    file: PathBuf,
    began: Instant,
    book: Mutex<Book>,
    /// Held while the book is written, so that the newest one stays.
    writing: tokio::sync::Mutex<()>,
}

/// Where notices go.
struct Destination {
    way: Way,
    /// Notified when there may be something to send.
    posted: Notify,
}

enum Way {
    Program(PathBuf),
    Webhook(Webhook),
}

/// What is known of the host, and what waits for each destination, in their order.
struct Book {
    watch: Watch,
    migrations: SeenMigrations,
    posts: Vec<Posted>,
}

#[derive(Default)]
struct Posted {
    post: Post,
    delivered_unix_ms: Option<u64>,
}

impl Notices {
    pub(crate) fn new(parts: &Parts, description: &Arc<Description>) -> Arc<Self> {
        let config: &NotifyConfig = &parts.config.notify;
        let program = config.program.clone().map(Way::Program);
        let webhook = config
            .webhook
            .clone()
            .map(|address| Way::Webhook(Webhook { address, secret_file: config.secret_file.clone() }));
        let destinations: Vec<Destination> = program
            .into_iter()
            .chain(webhook)
            .map(|way| Destination { way, posted: Notify::new() })
            .collect();
        let file = parts.config.data_dir.join(keeping::FILE);
        let book =
            keeping::read(&file).into_book(destinations.iter().map(|destination| destination.way.name()));
        Arc::new(Self {
            description: Arc::clone(description),
            stopping: parts.stopping.clone(),
            tells_warnings: config.warnings,
            destinations,
            file,
            began: Instant::now(),
            book: Mutex::new(book),
            writing: tokio::sync::Mutex::default(),
        })
    }

    /// Begins to look and to send, if there is a destination.
    pub(crate) fn begin(self: &Arc<Self>) {
        if self.destinations.is_empty() {
            return;
        }
        tokio::spawn(Arc::clone(self).look_on());
        for number in 0..self.destinations.len() {
            let (this, stopping) = (Arc::clone(self), self.stopping.begins());
            tokio::spawn(async move {
                tokio::select! {
                    () = this.send_on(number) => {}
                    () = stopping => {}
                }
            });
        }
    }

    /// Describes the destinations.
    pub(crate) fn describe(&self) -> Vec<NoticeDestination> {
        let book = self.lock();
        let described =
            self.destinations.iter().zip(&book.posts).map(|(destination, posted)| NoticeDestination {
                to: destination.way.name(),
                waiting: posted.post.waiting().len() as u64,
                lost: posted.post.lost(),
                delivered_unix_ms: posted.delivered_unix_ms,
                fault: posted.post.fault().map(str::to_owned),
            });
        described.collect()
    }

    /// Sends a notice to each destination at once, past those that wait, and returns what has become of it.
    pub(crate) async fn test(self: Arc<Self>) -> Result<Vec<NoticeDestination>, RequestError> {
        if self.destinations.is_empty() {
            let reason = "no notices are sent: set program or webhook below [notify] in the configuration, and restart the daemon";
            return Err(RequestError::Invalid(reason.to_owned()));
        }
        let subject = Subject { level: NoticeLevel::Warning, part: Part::Daemon, name: None };
        let message = "an administrator sees whether notices arrive".to_owned();
        let notice = self.notice(News { event: NoticeEvent::Test, subject, message });
        let sent = self.destinations.iter().map(|destination| destination.way.send(&notice));
        let sent = futures_util::future::join_all(sent).await;
        let mut described = self.describe();
        for (destination, result) in described.iter_mut().zip(sent) {
            if result.is_ok() {
                destination.delivered_unix_ms = Some(now_unix_ms());
            }
            destination.fault = result.err();
        }
        Ok(described)
    }

    async fn look_on(self: Arc<Self>) {
        let mut turns = tokio::time::interval(LOOK_EVERY);
        turns.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut stopping = std::pin::pin!(self.stopping.begins());
        loop {
            tokio::select! {
                _ = turns.tick() => self.look().await,
                () = &mut stopping => return,
            }
        }
    }

    async fn look(&self) {
        let readiness = self.description.attention().await;
        let conditions = conditions(readiness, self.tells_warnings);
        let now = self.began.elapsed();
        let has_changed = {
            let mut book = self.lock();
            let mut news = book.watch.look(now, conditions);
            let (failed, has_changed) = self.description.look_at_migrations(&mut book.migrations);
            news.extend(failed);
            let notices: Vec<Notice> = news.into_iter().map(|news| self.notice(news)).collect();
            for posted in &mut book.posts {
                posted.post.add(notices.iter().cloned());
            }
            has_changed || !notices.is_empty()
        };
        if has_changed {
            self.write().await;
            self.destinations.iter().for_each(|destination| destination.posted.notify_one());
        }
    }

    /// Sends what waits for a destination, one after the other.
    async fn send_on(&self, number: usize) {
        let Some(destination) = self.destinations.get(number) else { return };
        loop {
            let taken =
                self.with_post(number, |posted| posted.post.take(self.began.elapsed(), now_unix_ms()));
            if let Some(notice) = taken {
                let result = destination.way.send(&notice).await;
                if let Err(fault) = &result {
                    tracing::warn!(to = %destination.way.name(), %fault, "a notice is not delivered; it is tried again");
                }
                self.with_post(number, |posted| {
                    if result.is_ok() {
                        posted.delivered_unix_ms = Some(now_unix_ms());
                    }
                    posted.post.ended(self.began.elapsed(), result);
                });
                self.write().await;
                continue;
            }
            let wakes_at = self.with_post(number, |posted| posted.post.wakes_at());
            let wait = async {
                match wakes_at {
                    Some(at) => tokio::time::sleep(at.saturating_sub(self.began.elapsed())).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = wait => {}
                () = destination.posted.notified() => {}
            }
        }
    }

    fn with_post<T: Default>(&self, number: usize, act: impl FnOnce(&mut Posted) -> T) -> T {
        self.lock().posts.get_mut(number).map(act).unwrap_or_default()
    }

    fn notice(&self, News { event, subject, message }: News) -> Notice {
        let Subject { level, part, name } = subject;
        let id = keeping::draw_identity();
        let host = self.description.own_name();
        let message = shortened(message);
        Notice { id, time_unix_ms: now_unix_ms(), host, event, level, part, name, message }
    }

    /// Makes the book durable. Without that notices may be told twice, or not at all, after a restart.
    async fn write(&self) {
        let writing = self.writing.lock().await;
        let names = self.destinations.iter().map(|destination| destination.way.name());
        let kept = Kept::of(&self.lock(), names);
        let file = self.file.clone();
        let written = tokio::task::spawn_blocking(move || keeping::write(&file, &kept)).await;
        if let Ok(Err(error)) = written {
            tracing::warn!(%error, file = %self.file.display(), "what was told cannot be recorded");
        }
        drop(writing);
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Way {
    /// Returns its name for administrators, and for the book. It has no secret.
    fn name(&self) -> String {
        match self {
            Self::Program(program) => program.display().to_string(),
            Self::Webhook(webhook) => webhook.name(),
        }
    }

    /// Delivers a notice; an error says why that failed.
    async fn send(&self, notice: &Notice) -> Result<(), String> {
        let sending = async {
            match self {
                Self::Program(path) => program::run(path, notice).await,
                Self::Webhook(webhook) => webhook.post(notice).await,
            }
        };
        let too_late = || format!("it took longer than {} s", DELIVERY_MAX.as_secs());
        tokio::time::timeout(DELIVERY_MAX, sending).await.unwrap_or_else(|_| Err(too_late()))
    }
}

/// Returns a message of which a program can have a copy in its environment.
fn shortened(mut message: String) -> String {
    if message.len() > MESSAGE_BYTES_MAX {
        let end = (0..=MESSAGE_BYTES_MAX).rev().find(|end| message.is_char_boundary(*end));
        message.truncate(end.unwrap_or(0));
        message.push('…');
    }
    message
}

/// Returns the present conditions by what they are about. Several about one thing are one, with the words of all.
fn conditions(readiness: Readiness, with_warnings: bool) -> BTreeMap<Subject, String> {
    let problems = readiness.problems.into_iter().map(|problem| (NoticeLevel::Problem, problem));
    let warnings = readiness.warnings.into_iter().map(|warning| (NoticeLevel::Warning, warning));
    let mut conditions = BTreeMap::<Subject, String>::new();
    for (level, Problem { part, name, message }) in problems.chain(warnings.filter(|_| with_warnings)) {
        let words = conditions.entry(Subject { level, part, name }).or_default();
        if !words.is_empty() {
            words.push_str("; ");
        }
        words.push_str(&message);
    }
    conditions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_is_cut_between_two_characters() {
        assert_eq!(shortened("ä".to_owned()), "ä");
        let long = shortened("ä".repeat(MESSAGE_BYTES_MAX) + "ä");
        assert!(long.len() <= MESSAGE_BYTES_MAX + '…'.len_utf8() && long.ends_with("ä…"));
    }
}
