//! Reads the configuration again while the daemon serves: applies what can change without a restart, and lists the rest.
//!
//! ```text
//!   SIGHUP ─► certificates, API access ─► configuration ─► Changes ─┬─ limits: apply to later uses
//!                                                                   ├─ new stores: can be used
//!                                                                   └─ all else: logged, and unchanged until a restart
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use migration::journal::State;
use tokio::signal::unix::Signal;

use crate::config::{Config, ConfigError, ImpairmentConfig, Limits, StoreConfig};
use crate::custody::Custody;
use crate::error::with_causes;
use crate::grants::Grants;
use crate::host::{Exports, Parts, PresentLimits, blocking};
use crate::journal::Journal;
use crate::migrations::queue::Queue;
use crate::migrations::shares::Shares;
use crate::service_manager;
use crate::stores::Stores;

/// Reads the present configuration from its file.
pub type ReadConfig = Arc<dyn Fn() -> Result<Config, ConfigError> + Send + Sync>;

/// The differences between the configuration in use and the one that was read.
#[derive(Debug, PartialEq, Eq)]
struct Changes {
    /// The new limits, if they have changed.
    limits: Option<Limits>,
    added: BTreeMap<String, StoreConfig>,
    /// Settings that need a restart.
    left: Vec<String>,
}

impl Changes {
    /// Compares the configuration of the start, with the present limits and stores, with the one that was read.
    fn between(began: &Config, limits: Limits, stores: &BTreeMap<String, StoreConfig>, now: &Config) -> Self {
        let mut left = Vec::new();
        // N.B. exhaustive, so that a new key has to be handled here.
        let Config {
            data_dir,
            api,
            volume_sockets_dir,
            engine,
            api_socket,
            api_tls,
            volume_sockets,
            nbd,
            hosts,
            machines,
            hooks,
            standby,
            notify,
            web,
            stores: _,
            impairments: _,
            limits: _,
        } = began;
        let mut compare = |name: &str, is_same: bool| {
            if !is_same {
                left.push(name.to_owned());
            }
        };
        compare("data_dir", *data_dir == now.data_dir);
        compare("api", *api == now.api && *volume_sockets_dir == now.volume_sockets_dir);
        compare("engine", *engine == now.engine);
        compare("[api_socket]", *api_socket == now.api_socket);
        compare("[api_tls]", *api_tls == now.api_tls);
        compare("[volume_sockets]", *volume_sockets == now.volume_sockets);
        compare("[nbd]", *nbd == now.nbd);
        compare("[hosts]", *hosts == now.hosts);
        compare("[machines]", *machines == now.machines);
        compare("[hooks]", *hooks == now.hooks);
        compare("[standby]", *standby == now.standby);
        compare("[notify]", *notify == now.notify);
        compare("[web]", *web == now.web);
        let names: BTreeSet<&String> = stores.keys().chain(now.stores.keys()).collect();
        let mut added = BTreeMap::new();
        for name in names {
            match (stores.get(name), now.stores.get(name)) {
                (None, Some(store)) => drop(added.insert(name.clone(), store.clone())),
                (before, after) if before == after => {}
                _ => left.push(format!("[stores.{name}]")),
            }
        }
        let is_new = |name: &str| added.contains_key(name);
        let impaired = began.impairments.iter().chain(&now.impairments).map(|(name, _)| name);
        let changed = impaired
            .filter(|name| !is_new(name) && began.impairments.get(*name) != now.impairments.get(*name));
        let changed: BTreeSet<String> = changed.map(|name| format!("[stores.{name}]")).collect();
        left.extend(
            changed
                .into_iter()
                .filter(|name| stores.keys().any(|known| format!("[stores.{known}]") == **name)),
        );
        left.dedup();
        Self { limits: (limits != now.limits).then_some(now.limits), added, left }
    }
}

/// Reads certificates and the configuration again.
pub(crate) struct Reloading {
    grants: Arc<Grants>,
    config: Arc<Config>,
    limits: Arc<PresentLimits>,
    journal: Journal,
    custody: Custody,
    stores: Arc<Stores>,
    queue: Arc<Queue>,
    shares: Arc<Shares>,
    exports: Arc<Exports>,
}

impl Reloading {
    pub(super) fn new(parts: &Parts, exports: &Arc<Exports>) -> Arc<Self> {
        let Parts { grants, config, limits, journal, custody, stores, queue, shares, .. } = parts.clone();
        let exports = Arc::clone(exports);
        Arc::new(Self { grants, config, limits, journal, custody, stores, queue, shares, exports })
    }

    /// Reads certificates and the configuration again at each SIGHUP.
    pub(crate) async fn reload_at_hang_up(self: Arc<Self>, mut hang_ups: Signal, read: ReadConfig) {
        while hang_ups.recv().await.is_some() {
            service_manager::tell_reloading();
            let (host, read) = (Arc::clone(&self), Arc::clone(&read));
            let done = blocking(move || {
                host.exports.read_certificates();
                host.grants.reload();
                host.read_configuration(&read);
                Ok(())
            });
            // Each part has logged what it could not read.
            let _ = done.await;
            service_manager::tell_reloaded();
        }
    }

    fn set_limits(&self, limits: Limits) {
        self.limits.set(limits);
        self.queue.set_limits(limits.queue);
        self.shares.set_limits(limits.shares);
    }

    /// Applies the changes that need no restart. May block.
    fn read_configuration(&self, read: &ReadConfig) {
        let now = match read() {
            Ok(now) => now,
            Err(error) => {
                let reason = with_causes(&error);
                return tracing::error!(
                    %reason,
                    "cannot reload the configuration; the previous one stays in effect; run: sterna config check"
                );
            }
        };
        let Changes { limits, added, left } =
            Changes::between(&self.config, self.limits.now(), &self.stores.configured(), &now);
        if let Some(limits) = limits {
            self.set_limits(limits);
            tracing::info!(
                ?limits,
                "limits have changed; the amount copied at once applies to volumes that are served from now on"
            );
        }
        if !added.is_empty() {
            self.add_stores(&added, &now.impairments);
        }
        if !left.is_empty() {
            let changed = left.join(", ");
            tracing::warn!(%changed, "this change needs a restart, which breaks no connection: systemctl restart sterna");
        }
    }

    fn add_stores(
        &self,
        added: &BTreeMap<String, StoreConfig>,
        impairments: &BTreeMap<String, ImpairmentConfig>,
    ) {
        self.stores.add(added, impairments);
        self.custody.add_stores(&self.stores);
        let state = self.journal.read(State::clone);
        for store in self.stores.iter().filter(|store| added.contains_key(store.name())) {
            tracing::info!(store = store.name(), "the store can be used");
            if let Some(impairment) = self.stores.impairment(store.name()) {
                tracing::warn!(store = store.name(), %impairment, "the store is for tests and demonstrations only");
            }
            match store.check() {
                Err(problem) => {
                    tracing::warn!(store = store.name(), %problem, "cannot use the store at the moment");
                }
                Ok(()) => {
                    if let Err(error) = store.settle(&self.custody, &state) {
                        tracing::warn!(store = store.name(), %error, "cannot scan the store");
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Overrides;
    use crate::config::folders::Folders;

    fn config(text: &str) -> Config {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sterna.toml");
        std::fs::write(&file, format!("data_dir = '/d'\n{text}")).unwrap();
        let overrides = Overrides { config_file: Some(file), ..Overrides::default() };
        Config::load(&overrides, &Folders::of_this_user()).unwrap()
    }

    fn changes(before: &str, after: &str) -> Changes {
        let began = config(before);
        Changes::between(&began, began.limits, &began.stores, &config(after))
    }

    #[test]
    fn what_can_change_does_and_the_rest_is_named() {
        let stores = "[stores.a]\npath = '/a'\n";
        let none = changes(stores, stores);
        assert_eq!(none, Changes { limits: None, added: BTreeMap::new(), left: Vec::new() });
        let limited = changes(stores, &format!("{stores}[limits]\nmigrations_per_host = 7\n"));
        assert_eq!(limited.limits.unwrap().queue.per_host, 7);
        assert!(limited.left.is_empty());
        let more =
            changes(stores, &format!("{stores}[stores.b]\npath = '/b'\n[stores.b.delay]\nread_us = 5\n"));
        assert!(more.added.keys().eq(["b"]) && more.left.is_empty());
        let moved = changes(stores, "[stores.a]\npath = '/elsewhere'\n");
        assert_eq!((moved.added.len(), moved.left), (0, vec!["[stores.a]".to_owned()]));
        let gone = changes(&format!("{stores}[stores.b]\npath = '/b'\n"), stores);
        assert_eq!(gone.left, ["[stores.b]"]);
        let slower = changes(stores, &format!("{stores}[stores.a.delay]\nread_us = 5\n"));
        assert_eq!(slower.left, ["[stores.a]"]);
        let other = changes(stores, &format!("engine = 'threads'\n{stores}[nbd]\nconnections_max = 3\n"));
        assert_eq!(other.left, ["engine", "[nbd]"]);
    }
}
