//! Collects the host's metrics for Prometheus.
//!
//! ```text
//!   lanes: counters and latencies, by a message that a lane answers between two turns ──┐
//!   migrations, histories, journal: sums and copies ────────────────────────────────────┼──► Exposition ──► text
//!   hosts: what their sessions count; stores: space, on helper threads ─────────────────┘
//! ```
//! The collection delays nothing: a lane or a disk that does not answer in time is left out.

use std::sync::Arc;

use lane::LaneStatus;
use migration::HostId;
use migration::filling::{FillingProgress, UNIT_BYTES};

use crate::error::RequestError;
use crate::host::Description;
use crate::journal::now_unix_ms;
use crate::log;
use crate::metrics::Exposition;
use crate::stores::{Space, space_at};
use crate::volumes::registry::Service;
use crate::volumes::views::{ANSWER_MAX, answer};

mod links;
mod migrations;

/// A store with its space; `Err`: the store cannot be used, `None`: it reports no space.
pub(crate) type SeenStore = (String, Result<Option<Space>, ()>);

struct Seen {
    name: String,
    state: api::VolumeState,
    /// `None`: it has no lane, or the lane does not answer.
    status: Option<LaneStatus>,
}

impl Description {
    pub(crate) async fn metrics(self: &Arc<Self>) -> Result<String, RequestError> {
        let mut told = Exposition::default();
        // N.B. the VMs as they were seen last: a monitor serves one client at a time, and is not asked by every collection.
        let (volumes, stores, data, slow) = tokio::join!(
            self.volumes_seen(),
            self.stores_seen(),
            self.data_folder_seen(),
            self.told_by_the_slow()
        );
        self.add_daemon(&mut told);
        self.add_volumes(&mut told, &volumes);
        self.add_filling(&mut told, &volumes);
        let mut family = told.gauge("sterna_vm_state", "The state that a VM is in: its sample is 1.");
        for vm in &slow.vms {
            family.flag(&[("vm", &vm.name), ("state", vm.state.name())], true);
        }
        migrations::add(&mut told, &self.migrations.list_unfinished(&self.journal));
        migrations::add_sums(&mut told, &self.histories.tallies(), &self.ends.sums());
        links::add(&mut told, &self.hosts.describe_all().unwrap_or_default());
        self.add_standbys(&mut told);
        self.add_shares(&mut told);
        self.add_journal(&mut told);
        self.add_audit(&mut told);
        add_space(&mut told, &stores, data);
        told.text().map_err(|error| RequestError::Internal(error.to_string()))
    }

    async fn volumes_seen(&self) -> Vec<Seen> {
        let seen = self.views.all_volumes().into_iter().map(|(name, volume, service)| async move {
            let moved = volume.is_some_and(|id| self.journal.read(|state| state.moved.contains_key(&id)));
            let state = match &service {
                Service::Creating(_) => api::VolumeState::Creating,
                Service::Starting | Service::Waiting(_) => api::VolumeState::Waiting,
                Service::Arriving(..) => api::VolumeState::Arriving,
                Service::Serving(_) if moved => api::VolumeState::Forwarding,
                Service::Serving(_) => api::VolumeState::Serving,
                Service::Failed(_) => api::VolumeState::Failed,
                Service::Unconfirmed(_) => api::VolumeState::Unconfirmed,
                Service::Removing => api::VolumeState::Removing,
            };
            let (Service::Serving(lane) | Service::Arriving(lane, _)) = service else {
                return Seen { name, state, status: None };
            };
            let status = tokio::time::timeout(ANSWER_MAX, lane.status()).await;
            Seen { name, state, status: status.ok().and_then(Result::ok) }
        });
        futures_util::future::join_all(seen).await
    }

    pub(crate) async fn stores_seen(self: &Arc<Self>) -> Vec<SeenStore> {
        let names: Vec<String> = self.stores.iter().map(|store| store.name().to_owned()).collect();
        let seen = names.into_iter().map(|name| async move {
            let (host, asked) = (Arc::clone(self), name.clone());
            let looked = answer(&self.looks, move || host.stores.get(&asked).ok()?.space().ok());
            let space = looked.await.flatten().ok_or(());
            (name, space)
        });
        futures_util::future::join_all(seen).await
    }

    pub(crate) async fn data_folder_seen(&self) -> Option<Space> {
        let path = self.config.data_dir.clone();
        answer(&self.looks, move || space_at(&path).ok()).await.flatten()
    }

    fn add_shares(&self, told: &mut Exposition) {
        let mut family =
            told.gauge("sterna_host_arrivals", "Migrations of another host that are on their way here.");
        for peer in self.hosts.describe_all().unwrap_or_default() {
            if let Some(known) = self.hosts.find(&peer.name) {
                let (migrations, _) = self.shares.used_by(HostId(known.id.0));
                family.count(&[("host", &peer.name)], migrations.into());
            }
        }
    }

    fn add_daemon(&self, told: &mut Exposition) {
        told.gauge("sterna_build_info", "The daemon that answers.")
            .flag(&[("version", env!("CARGO_PKG_VERSION"))], true);
        told.gauge("sterna_start_time_seconds", "When the daemon began, in seconds since 1970.")
            .add(&[], self.started_unix_ms as f64 / 1000.0);
        told.counter("sterna_log_lines_lost_total", "Lines of the log that could not be written.")
            .count(&[], log::lost());
        told.counter(
            "sterna_log_lines_suppressed_total",
            "Lines of the log beyond what one kind may have in a time.",
        )
        .count(&[], log::suppressed());
    }

    fn add_volumes(&self, told: &mut Exposition, volumes: &[Seen]) {
        let mut family = told.gauge("sterna_volume_state", "The state that a volume is in: its sample is 1.");
        for seen in volumes {
            family.flag(&[("volume", &seen.name), ("state", seen.state.name())], true);
        }
        let mut family =
            told.gauge("sterna_volume_up", "Whether guests can use a volume, and its thread answers.");
        for seen in volumes {
            let is_used = matches!(seen.state, api::VolumeState::Serving | api::VolumeState::Forwarding);
            family.flag(&[("volume", &seen.name)], is_used && seen.status.is_some());
        }
        let with_status = || volumes.iter().filter_map(|seen| Some((&seen.name, seen.status.as_ref()?)));
        let mut family = told.counter("sterna_volume_requests_total", "Requests of guests that have ended.");
        for (name, status) in with_status() {
            let of = [("read", status.reads), ("write", status.writes), ("flush", status.flushes)];
            for (operation, count) in of {
                family.count(&[("volume", name), ("operation", operation)], count);
            }
        }
        let sums: [(&str, &str, fn(&LaneStatus) -> u64); 3] = [
            ("sterna_volume_read_bytes_total", "Bytes that guests have read.", |status| status.bytes_read),
            ("sterna_volume_written_bytes_total", "Bytes that guests have written.", |status| {
                status.bytes_written
            }),
            ("sterna_volume_request_errors_total", "Requests of guests that failed.", |status| status.errors),
        ];
        for (metric, help, sum) in sums {
            let mut family = told.counter(metric, help);
            with_status().for_each(|(name, status)| family.count(&[("volume", name)], sum(status)));
        }
        let mut family =
            told.histogram("sterna_volume_request_duration_seconds", "How long requests of guests took.");
        for (name, status) in with_status() {
            family.times(&[("volume", name)], &status.latencies);
        }
        let mut family = told.gauge("sterna_volume_requests_in_flight", "Requests of guests under way.");
        for (name, status) in with_status() {
            family.count(&[("volume", name)], status.requests_in_flight as u64);
        }
        let mut family = told.gauge("sterna_volume_connections", "NBD connections of this host's clients.");
        for (name, status) in with_status() {
            family.count(&[("volume", name)], status.connections as u64);
        }
        let mut family = told
            .gauge("sterna_volume_clients_elsewhere", "Clients that another host forwards to a volume here.");
        for (name, status) in with_status() {
            for (host, clients) in self.hosts.clients_by_name(&status.clients_elsewhere) {
                family.count(&[("volume", name), ("host", &host)], u64::from(clients));
            }
        }
    }

    fn add_filling(&self, told: &mut Exposition, volumes: &[Seen]) {
        let filling = || {
            let filled = volumes.iter().filter_map(|seen| Some((&seen.name, seen.status.as_ref()?.filling?)));
            filled.filter(|(_, progress)| progress.units_missing > 0)
        };
        let gauges: [(&str, &str, fn(&FillingProgress) -> u64); 3] = [
            (
                "sterna_volume_missing_bytes",
                "Bytes that have not arrived from the volume's former host.",
                |filling| filling.units_missing * UNIT_BYTES,
            ),
            (
                "sterna_volume_unreadable_bytes",
                "Missing bytes that the former host cannot read.",
                |filling| filling.units_unreadable * UNIT_BYTES,
            ),
            (
                "sterna_volume_requests_waiting",
                "Requests of guests that wait for missing bytes.",
                |filling| filling.requests_waiting as u64,
            ),
        ];
        for (metric, help, count) in gauges {
            let mut family = told.gauge(metric, help);
            filling().for_each(|(name, progress)| family.count(&[("volume", name)], count(&progress)));
        }
    }

    fn add_standbys(&self, told: &mut Exposition) {
        let standbys = self.standbys.sources();
        let mut family = told
            .gauge("sterna_standby_age_seconds", "The age of the state that a promotion would bring back.");
        for standby in &standbys {
            standby.age_seconds.iter().for_each(|age| family.add(&[("standby", &standby.name)], *age));
        }
        let mut family = told.gauge("sterna_standby_waiting_bytes", "What a standby lacks.");
        for standby in &standbys {
            standby
                .bytes_waiting
                .iter()
                .for_each(|bytes| family.count(&[("standby", &standby.name)], *bytes));
        }
        let mut family = told
            .counter("sterna_standby_sent_bytes_total", "What was sent to a standby since the daemon began.");
        for standby in &standbys {
            standby.bytes_sent.iter().for_each(|bytes| family.count(&[("standby", &standby.name)], *bytes));
        }
        Self::add_comparisons(told, &standbys);
    }

    fn add_comparisons(told: &mut Exposition, standbys: &[api::Standby]) {
        let compared = || standbys.iter().filter_map(|standby| Some((standby, standby.compared.as_ref()?)));
        let mut family = told.gauge(
            "sterna_standby_compared_age_seconds",
            "The time since everything was last compared with a standby.",
        );
        for (standby, compared) in compared() {
            let age_ms = now_unix_ms().saturating_sub(compared.unix_ms);
            family.add(&[("standby", &standby.name)], age_ms as f64 / 1000.0);
        }
        let mut family = told.gauge(
            "sterna_standby_differing_bytes",
            "What differed when everything was last compared with a standby, and was sent again.",
        );
        for (standby, compared) in compared() {
            family.count(&[("standby", &standby.name)], compared.bytes_differing);
        }
    }

    fn add_journal(&self, told: &mut Exposition) {
        let figures = self.journal.figures();
        told.counter("sterna_journal_commits_total", "Commits that became durable.")
            .count(&[], figures.commits);
        told.counter("sterna_journal_records_total", "Records that became durable.")
            .count(&[], figures.records);
        told.counter("sterna_journal_failures_total", "Commits that were refused or are in doubt.")
            .count(&[], figures.failures);
        told.gauge("sterna_journal_size_bytes", "Bytes of the journal's file that hold something.")
            .count(&[], figures.file_bytes);
        told.histogram(
            "sterna_journal_write_duration_seconds",
            "How long durable writes of the journal took.",
        )
        .times(&[], &figures.writes);
    }
}

impl Description {
    fn add_audit(&self, told: &mut Exposition) {
        let (written, lost) = self.audit.counts();
        told.counter("sterna_audit_entries_total", "Entries that the audit log has durably.")
            .count(&[], written);
        told.counter("sterna_audit_lost_total", "Entries that the audit log could not take.")
            .count(&[], lost);
    }
}

fn add_space(told: &mut Exposition, stores: &[SeenStore], data: Option<Space>) {
    let mut family = told.gauge("sterna_store_up", "Whether a store can be used, and its disk answers.");
    for (name, space) in stores {
        family.flag(&[("store", name)], space.is_ok());
    }
    let spaces = || stores.iter().filter_map(|(name, space)| Some((name, (*space).ok()??)));
    let mut family = told.gauge("sterna_store_size_bytes", "Size of a store's file system or device.");
    spaces().for_each(|(name, space)| family.count(&[("store", name)], space.total));
    let mut family = told.gauge("sterna_store_free_bytes", "What volumes may still use of a store.");
    spaces().for_each(|(name, space)| family.count(&[("store", name)], space.free));
    if let Some(space) = data {
        told.gauge("sterna_data_folder_size_bytes", "Size of the data folder's file system.")
            .count(&[], space.total);
        told.gauge("sterna_data_folder_free_bytes", "What is free of the data folder's file system.")
            .count(&[], space.free);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    const SOURCES: [&str; 3] =
        [include_str!("metrics.rs"), include_str!("metrics/links.rs"), include_str!("metrics/migrations.rs")];
    const PAGE: &str = include_str!("../../../../../docs/observe.md");

    /// Returns the names of metrics in a text, without the suffixes of histograms.
    fn names(text: &str) -> BTreeSet<&str> {
        let is_part = |byte: char| byte.is_ascii_lowercase() || byte == '_';
        let found = text.match_indices("sterna_").map(|(at, _)| {
            let rest = &text[at..];
            &rest[..rest.find(|byte| !is_part(byte)).unwrap_or(rest.len())]
        });
        let suffixes = ["_bucket", "_sum", "_count"];
        found.map(|name| suffixes.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name)).collect()
    }

    fn told() -> BTreeSet<&'static str> {
        let product = SOURCES.map(|text| text.split("#[cfg(test)]").next().unwrap_or_default());
        product.iter().flat_map(|text| names(text)).collect()
    }

    #[test]
    fn rules_and_dashboard_ask_only_for_what_is_told() {
        let rules = include_str!("../../../../../contrib/prometheus/rules.yml");
        let dashboard = include_str!("../../../../../contrib/grafana/sterna.json");
        for text in [rules, dashboard] {
            let asked = names(text);
            let missing: Vec<_> = asked.difference(&told()).copied().collect();
            assert!(asked.len() > 15 && missing.is_empty(), "{missing:?}");
        }
    }

    #[test]
    fn every_metric_is_on_the_page_and_the_page_names_no_other() {
        assert_eq!(names(PAGE), told());
    }

    #[test]
    fn the_dashboard_has_panels_that_do_not_overlap_and_a_query_in_each() {
        let dashboard: serde_json::Value =
            serde_json::from_str(include_str!("../../../../../contrib/grafana/sterna.json")).unwrap();
        let mut places = BTreeSet::new();
        let mut ids = BTreeSet::new();
        for panel in dashboard["panels"].as_array().unwrap() {
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel}");
            let at = |side: &str| panel["gridPos"][side].as_u64().unwrap();
            for x in at("x")..at("x") + at("w") {
                assert!(x < 24 && (at("y")..at("y") + at("h")).all(|y| places.insert((x, y))), "{panel}");
            }
            if panel["type"] != "row" {
                let targets = panel["targets"].as_array().unwrap();
                assert!(targets.iter().all(|target| target["expr"].is_string()), "{panel}");
                assert!(!targets.is_empty(), "{panel}");
            }
        }
    }
}
