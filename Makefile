# What people type. Everything else is cargo's: see CONTRIBUTING.md.
#
# Works on Debian 12 (or a relative) with make and a Rust toolchain. What is missing besides is installed by
# scripts/install-packages if this runs as root; otherwise it says what to install.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo install deb test test-newer-qemu lint bench fuzz openapi pictures

# Cargo runs tests in the folder of their crate, so paths given to them are absolute.
TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
GUEST_IMAGE := $(TARGET)/guest-image

# Simulated migrations. Each fault must strike each phase in which it can: in 50 of 100000 seeds, in 5 of 10000.
SEEDS ?= 10000
# The same between two hosts, and between three: volumes tour them, and people promote what waits.
HOSTS_SEEDS ?= 4000
TOUR_SEEDS ?= 2500

help: ## Say what there is.
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 24

demo: ## Move a busy virtual machine with its disk to another host and home, and check every block.
	scripts/install-packages demo
	scripts/guest-image $(GUEST_IMAGE)
	@echo "compiling Sterna for the demo: some minutes, once"
	cargo build --profile demo $(PROGRAMS)
	STERNA_GUEST_IMAGE=$(GUEST_IMAGE) $(TARGET)/demo/sterna demo --hosts --vm

# The program that is installed and packed; another one need not be built.
BINARY ?= $(TARGET)/release/sterna
# The program, and the one that `sterna bench` and `sterna demo` start.
PROGRAMS := -p sterna -p lab --bin sterna --bin sterna-lab
PREFIX ?= /usr/local
DESTDIR ?=

$(TARGET)/release/sterna: FORCE
	scripts/install-packages build
	cargo build --release $(PROGRAMS)
FORCE:

install: $(BINARY) ## Install program, unit, manual pages and completions below DESTDIR and PREFIX (/usr/local).
	scripts/install "$(BINARY)" "$(DESTDIR)" "$(PREFIX)"

deb: $(BINARY) ## Make a Debian package in target/.
	scripts/install-packages deb
	scripts/deb "$(BINARY)" "$(TARGET)"

# Whatever runs here is built once, with the packages, features and profile of the tests; only the simulator, which can break
# rules on purpose, needs a few crates again. What only computes runs beside the tests, on what they leave of the processors:
# that, and one more command (BESIDE="make lint").
BESIDE ?=
SIMULATOR := $(TARGET)/simulator-with-planted-bugs
test: export STERNA_BIN := $(TARGET)/debug/sterna
test: export STERNA_GUEST_IMAGE := $(GUEST_IMAGE)
# What a package or root would let run must run; what the kernel does not have is listed in the end (dev/omission).
test: export STERNA_TESTS_MUST_RUN ?= 1
test: export STERNA_TESTS_LEFT_OUT := $(TARGET)/left-out
test: ## Run every test of the workspace, and beside them simulated migrations and planted bugs.
	scripts/install-packages test
	scripts/guest-image $(GUEST_IMAGE)
	rm -f $(TARGET)/left-out
	cargo build --bin simulator --features simulator/planted-bugs
	cp $(TARGET)/debug/simulator $(SIMULATOR)
	scripts/test-workspace \
	  "$(SIMULATOR) --planted all" \
	  "$(SIMULATOR) --seeds $(SEEDS)" \
	  "$(SIMULATOR) --restored --seeds $(SEEDS)" \
	  "$(SIMULATOR) --small --seeds 4000" \
	  "$(SIMULATOR) --custody --seeds $(SEEDS)" \
	  "$(SIMULATOR) --orders --seeds 10000" \
	  "$(SIMULATOR) --standbys --seeds 10000" \
	  "$(SIMULATOR) --hosts 2 --seeds $(HOSTS_SEEDS)" \
	  "$(SIMULATOR) --hosts 3 --seeds $(TOUR_SEEDS)" \
	  $(if $(BESIDE),"$(BESIDE)")
	@[[ ! -e $(TARGET)/left-out ]] || sort -u $(TARGET)/left-out

# Whatever Sterna says to QEMU, said to the newest that Debian has for this release, and machines that move from the one to
# the other. Not part of `make test`: it downloads that QEMU.
test-newer-qemu: export STERNA_BIN := $(TARGET)/debug/sterna
test-newer-qemu: export STERNA_GUEST_IMAGE := $(GUEST_IMAGE)
test-newer-qemu: export STERNA_NEWER_QEMU := $(TARGET)/newer-qemu/bin
test-newer-qemu: ## Run the tests of machines with the QEMU of Debian's backports.
	scripts/install-packages test
	scripts/guest-image $(GUEST_IMAGE)
	scripts/newer-qemu $(TARGET)/newer-qemu
	cargo build -p sterna
	PATH=$(STERNA_NEWER_QEMU):$$PATH cargo test -p hypervisor
	PATH=$(STERNA_NEWER_QEMU):$$PATH cargo test -p e2e --test vms -- disks in_place memory tpm whole
	cargo test -p e2e --test vms -- --ignored

# cargo-deny checks licences and sources by deny.toml. It takes longer to build than all of Sterna, so it is used where
# it is there, and never installed.
lint: ## Check format, clippy's lints, documentation, scripts, licences.
	scripts/install-packages lint
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --features simulator/planted-bugs -- -D warnings
	RUSTDOCFLAGS='-D warnings -A rustdoc::private-intra-doc-links' cargo doc --workspace --no-deps --document-private-items --quiet
	shellcheck --external-sources .ci/run scripts/* packaging/debian/p* contrib/nut/*
	@if cargo deny --version >/dev/null 2>&1; then \
	  cargo deny --all-features check licenses bans sources; \
	else \
	  echo "licences and sources are not checked: there is no cargo-deny (cargo install --locked cargo-deny)"; \
	fi

# What the figures mean: docs/performance.md. The machine should be idle meanwhile.
openapi: ## Write docs/openapi.json and the client in Python anew, after a change of the HTTP API.
	cargo run --quiet -p daemon --example openapi >$(TARGET)/openapi.json
	mv $(TARGET)/openapi.json docs/openapi.json
	contrib/python/generate.py

pictures: ## Make the pictures of the documents anew: the page, a report, sterna top.
	scripts/pictures

# Seconds for each target. What reaches code that what is kept does not goes into dev/fuzz/corpus; `cargo test` replays that.
FUZZ_SECONDS ?= 600
FUZZ_TARGETS ?= nbd_decoders nbd_connection http_api config journal remote_decoders remote_store qcow2_image transport_frames pasted_texts vm_commands
FUZZ_FLAGS := --fuzz-dir dev/fuzz --target-dir $(TARGET)/fuzz

# libFuzzer's instrumentation is not in stable Rust yet: RUSTC_BOOTSTRAP lets the stable compiler have it.
fuzz: export RUSTC_BOOTSTRAP := 1
fuzz: ## Feed hostile bytes to whatever reads bytes, FUZZ_SECONDS (600) for each target.
	scripts/install-packages build
	cargo fuzz --version >/dev/null 2>&1 || cargo install cargo-fuzz --locked
	for target in $(FUZZ_TARGETS); do \
	  new=$$(mktemp -d); \
	  cargo fuzz run $(FUZZ_FLAGS) $$target $$new dev/fuzz/corpus/$$target -- \
	    -max_total_time=$(FUZZ_SECONDS) -timeout=25 -max_len=65536 -malloc_limit_mb=128 -print_final_stats=1; \
	  cargo fuzz run $(FUZZ_FLAGS) $$target -- \
	    -set_cover_merge=1 -use_counters=0 -max_len=1024 dev/fuzz/corpus/$$target $$new; \
	  rm -r $$new; \
	done

bench: ## Measure what recording a write costs, Sterna beside the raw disk and QEMU, migrations beside copies and over links.
	scripts/install-packages bench
	scripts/guest-image $(GUEST_IMAGE)
	cargo bench -p chronicle --bench chronicle
	cargo build --release $(PROGRAMS)
	$(TARGET)/release/sterna bench nbd
	$(TARGET)/release/sterna bench mirror
	$(TARGET)/release/sterna bench machine --image $(GUEST_IMAGE)
	$(TARGET)/release/sterna bench return
	@if [[ $$(id -u) -eq 0 ]]; then \
	  $(TARGET)/release/sterna bench link; \
	else \
	  echo "links are not measured: that needs root (sterna bench link)"; \
	fi
