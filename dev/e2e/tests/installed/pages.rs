//! Runs the commands of the pages about hosts, VMs, domains and QEMU's options on a disposable system. They run at `rack3-a`,
//! which has the folders of a package; `rack3-b` runs beside it.

use anyhow::{Context as _, ensure};
use e2e::blocks::blocks;
use e2e::program;
use e2e::throw_away_root::{ThrowAwayRoot, repository};

/// Commands before all pages: the program, and two unpaired hosts.
const HOSTS: &str = r#"
ln -s /mnt/sterna /usr/local/bin/sterna
ip address add 192.0.2.1/32 dev lo
# Hooks are what docs/vm.md has; until it comes to them they do nothing.
printf '#!/bin/sh\n' >hook && chmod +x hook
start_host() {
  local name=$1 place=$2
  mkdir -p "$place/fast" "$place/slow" "/etc/$name"
  cat >"/etc/$name/sterna.toml"
  sterna serve --config "/etc/$name/sterna.toml" 2>"/tmp/$name.log" &
}
start_host rack3-a /srv <<'END'
[hosts]
listen = ["127.0.0.1:7423"]
[stores.fast]
path = "/srv/fast"
[stores.slow]
path = "/srv/slow"
[hooks]
after = "/root/work/hook"
END
start_host rack3-b /srv/b <<'END'
data_dir = "/var/lib/rack3-b"
api = "unix:/run/rack3-b/sterna.sock"
[hosts]
listen = ["192.0.2.1:7423"]
[stores.fast]
path = "/srv/b/fast"
[hooks]
after = "/root/work/hook"
END
until sterna store list && sterna --host "$PEER" store list; do sleep 0.1; done 2>/dev/null
"#;

const WORDS: &str = r#"
cd /root/work
export PEER=unix:/run/rack3-b/sterna.sock
# A definition, with more words for QEMU.
define() {
  cat >web1.toml <<'END'
command = ["qemu-system-x86_64", "-accel", "tcg", "-m", "65528K", "-nodefaults", "-display", "none",
    "-name", "{name}", "-qmp", "unix:{qmp},server=on,wait=off",
    "-blockdev", "driver=nbd,node-name=root,server.type=unix,server.path={disk:root},export={export:root},reconnect-delay=60",
    "-device", "virtio-blk-pci,drive=root"@MORE@]
[disks]
root = "web1-root"
END
  sed -i "s|@MORE@|${1-}|" web1.toml
}
state() { sterna vm show web1 --json | jq -r .state; }
"#;

struct Part {
    document: &'static str,
    /// The heading, and the index of the block below it.
    block: (&'static str, usize),
    /// Whether the block runs as a whole, or line by line with `each` before each line.
    script: &'static str,
    /// Commands before each line, which is `$line` there.
    each: Option<&'static str>,
}

/// The marker for the commands in the script.
const HERE: &str = "@HERE@";

/// The pages in the order of their run.
const PARTS: [Part; 11] = [
    // As the comment says, some commands run on both hosts, and the invitation of one goes to the other.
    Part {
        document: "docs/hosts.md",
        block: ("## Pairing", 0),
        script: r#"
sterna --host "$PEER" host init --name rack3-b
@HERE@
sterna --host "$PEER" host remove rack3-a --force
sterna --host "$PEER" host invite --allow-machines --json | jq -r .token >invitation
sterna host join 192.0.2.1:7423 --token-file invitation --allow-machines
"#,
        each: Some(
            r#"
case $line in
"sterna host join"*) export STERNA_INVITATION=$(sterna --host "$PEER" host invite --json | jq -r .token) ;;
"sterna host remove"*) sterna host list --json | jq -e '.[0].machines' ;;
esac"#,
        ),
    },
    // Each line needs the VM in another state. The guest obeys the power button.
    Part {
        document: "docs/vm.md",
        block: ("## A definition", 0),
        script: r#"
sterna volume create web1-root --size 16MiB --store fast
define ', "-qmp", "unix:/tmp/button,server=on,wait=off"'
cat >guest.py <<'END'
# Obeys the VM's power button, or stops the VM, over a monitor of its own.
import json, socket, sys, time
monitor = socket.socket(socket.AF_UNIX)
while monitor.connect_ex("/tmp/button"): time.sleep(0.1)
said = monitor.makefile("r")
def say(command): monitor.sendall(json.dumps({"execute": command}).encode())
def wait(word):
    while word not in json.loads(said.readline()): pass
wait("QMP")
say("qmp_capabilities")
wait("return")
print("ready", flush=True)
if sys.argv[1] == "obey":
    while json.loads(said.readline()).get("event") != "POWERDOWN": pass
    say("quit")
    while said.readline(): pass
else:
    say("stop")
    wait("return")
END
@HERE@
if sterna vm show web1; then false; fi
sterna volume show web1-root --json | jq -e '.state == "serving"'
"#,
        each: Some(
            r#"
case $line in
*"now"*) [[ $(state) == stopped ]]; sterna vm start web1 ;;
*"vm stop"*) [[ $(state) == running ]]; python3 guest.py obey >obeys &
  until grep ready obeys; do sleep 0.1; done ;;
*suspend*) sterna vm start web1 ;;
*resume*) sterna vm start web1; python3 guest.py stop; [[ $(state) == paused ]] ;;
*remove*) [[ $(state) == running ]]; sterna vm stop web1 --now ;;
esac"#,
        ),
    },
    // Each line leaves the VM in the state that the next one needs.
    Part {
        document: "docs/vm.md",
        block: ("## Suspending to disk", 0),
        script: r#"
define
sterna vm add web1 --definition web1.toml
sterna vm start web1
@HERE@
[[ $(state) == stopped ]]
sterna vm remove web1
"#,
        each: None,
    },
    // There are several moves, and the VM returns after each.
    Part {
        document: "docs/vm.md",
        block: ("## Moving to another host", 0),
        script: "define\nsterna vm add web1 --definition web1.toml\nsterna vm start web1\n@HERE@\n",
        each: Some(COME_HOME),
    },
    Part {
        document: "docs/vm.md",
        block: ("## Moving to another host", 1),
        script: HERE,
        each: Some(COME_HOME),
    },
    // The hooks of both hosts set the route to the VM's address.
    Part {
        document: "docs/vm.md",
        block: ("## Moving to another host", 2),
        script: r#"
sterna --host "$PEER" migrate web1 --to rack3-a:fast
ip link add br0 type veth peer name br0-other
ip link set br0 up
# One system is both hosts here, and they change the same routes, in whatever order.
ip route add 198.51.100.7 dev br0
printf '#!/bin/sh\necho "$1" "$STERNA_SIDE" >>/tmp/addresses; echo 198.51.100.7\n' >/usr/local/bin/address_of
chmod +x /usr/local/bin/address_of
cat >hook <<'END_OF_HOOK'
@HERE@
END_OF_HOOK
sterna migrate web1 --to rack3-b:fast
until [[ $(sort /tmp/addresses) == $'web1 source\nweb1 target' ]]; do sleep 0.1; done
sterna migration list --json | jq -e 'last.message == null'
printf '#!/bin/sh\n' >hook
sterna --host "$PEER" vm stop web1 --now
sterna --host "$PEER" vm remove web1
"#,
        each: None,
    },
    // A VM that runs already, changed so that it does not need KVM.
    Part {
        document: "docs/vm.md",
        block: ("## A VM that was started without Sterna", 0),
        script: r#"
truncate -s 16M /srv/web1.raw
qemu-system-x86_64 -accel tcg -m 65528K -nodefaults -display none -daemonize -qmp unix:/run/web1.qmp,server=on,wait=off \
  -device virtio-blk-pci,drive=root \
  -blockdev driver=file,node-name=file,filename=/srv/web1.raw -blockdev driver=raw,node-name=root,file=file
@HERE@
sterna --host "$PEER" volume list --json | jq -e 'all(.name != "web1")'
ls -l "/proc/$(pgrep qemu-system)/fd" | grep /srv/b/fast/web1
pkill qemu-system
# Nobody is left behind who would be led there.
while sterna --host unix:/run/sterna/sterna.sock volume show web1; do sleep 0.1; done
"#,
        each: Some(r#"[[ $line != *release* ]] || export STERNA_HOST=$PEER"#),
    },
    Part {
        document: "docs/nbd.md",
        block: ("## What an export offers", 0),
        script: r#"
sterna volume create web1 --size 16MiB --store fast
words=$(
  cat <<'END'
@HERE@
END
)
qemu-system-x86_64 -accel tcg -m 64 -nodefaults -display none -daemonize $words
sterna volume show web1 --json | jq -e '.statistics.connections == 1'
pkill qemu-system
sterna volume remove web1 --force --delete-image
"#,
        each: None,
    },
    // A domain of libvirtd, which looks up a user that its package would make.
    Part {
        document: "docs/libvirt.md",
        block: ("", 0),
        script: r#"
id libvirt-qemu || useradd --system libvirt-qemu
mkdir -p /etc/libvirt
printf '%s\n' 'user = "root"' 'group = "root"' 'security_driver = "none"' 'namespaces = []' 'cgroup_controllers = []' \
  'stdio_handler = "file"' >/etc/libvirt/qemu.conf
libvirtd --daemon
truncate -s 16M /srv/web1.raw
cat >domain.xml <<'END'
<domain type='qemu'><name>web1</name><memory unit='MiB'>64</memory><os><type arch='x86_64'>hvm</type></os><devices>
<emulator>/usr/bin/qemu-system-x86_64</emulator><controller type='usb' model='none'/><memballoon model='none'/>
<disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/><source file='/srv/web1.raw'/>
<target dev='vda' bus='virtio'/></disk></devices></domain>
END
export LIBVIRT_DEFAULT_URI=qemu:///system
until virsh version; do sleep 0.1; done
virsh define domain.xml
virsh start web1
@HERE@
virsh dumpxml web1 | grep "file='/srv/web1.raw'"
[[ $(virsh domstate web1) == running* ]]
if sterna volume show web1; then false; fi
virsh destroy web1
"#,
        each: Some(
            r#"
case $line in
*"sterna migrate"*) virsh dumpxml web1 | grep "protocol='nbd'"; [[ $(sterna volume show web1 --json | jq -r .store) == fast ]] ;;
*release*) [[ $(sterna volume show web1 --json | jq -r .store) == slow ]] ;;
esac"#,
        ),
    },
    // The disk moves first, then the memory by virsh. In its own namespaces rack3-b has a name, a libvirt and a folder of sockets
    // as another machine, and ssh connects to it.
    Part {
        document: "docs/libvirt.md",
        block: ("## By hand", 0),
        script: r#"
end() { pkill -f "$1"; while pgrep -f "$1"; do sleep 0.1; done; }
until_there() { until sterna --host "$PEER" store list; do sleep 0.1; done 2>/dev/null; }
end /etc/rack3-b/sterna.toml
# What the VM above has been given back.
rm /srv/b/fast/web1.img
echo '192.0.2.1 rack3-b' >>/etc/hosts
sed 's|/run/rack3-b/|/run/sterna/|' /etc/rack3-b/sterna.toml >/etc/rack3-b/apart.toml
cat >apart <<'END'
hostname rack3-b
qemu=$(cat /etc/libvirt/qemu.conf)
for folder in /etc/libvirt /run/libvirt /var/lib/libvirt; do mount -t tmpfs tmpfs "$folder"; done
mount --bind /run/rack3-b /run/sterna
echo "$qemu" >/etc/libvirt/qemu.conf
echo "host_uuid = '$(cat /proc/sys/kernel/random/uuid)'" >/etc/libvirt/libvirtd.conf
libvirtd --daemon --pid-file /run/libvirt/pid
exec sterna serve --config /etc/rack3-b/apart.toml
END
unshare --mount --uts bash apart 2>/tmp/rack3-b.log &
there=$!
cat >/usr/local/bin/ssh <<END
#!/bin/bash
while [[ \$1 != rack3-b ]]; do shift; done
exec nsenter --mount --uts --target $there sh -c "\${*:2}"
END
chmod +x /usr/local/bin/ssh
until_there
export LIBVIRT_DEFAULT_URI=qemu:///system
virsh start web1
sterna vm adopt --libvirt web1 --store fast
@HERE@
[[ $(state) == running ]]
[[ $(sterna volume show web1 --json | jq -r .store) == fast && $(ls /srv/b/fast/web1.*) == /srv/b/fast/web1.img ]]
if virsh domstate web1; then false; fi
if sterna --host unix:/run/sterna/sterna.sock volume show web1; then false; fi
virsh -c qemu+ssh://rack3-b/system destroy web1
sterna vm release web1
end /etc/rack3-b/apart.toml
sterna serve --config /etc/rack3-b/sterna.toml 2>>/tmp/rack3-b.log &
until_there
"#,
        each: Some(r#"[[ $line != *adopt* ]] || export STERNA_HOST=$PEER"#),
    },
    // rack3-b is prepared, and rack3-a has released. One of the two daemons does not run, so that they have no contact.
    Part {
        document: "docs/hosts.md",
        block: ("## When something breaks", 0),
        script: r#"
begin() { env "$@" sterna serve --config "/etc/$host/sterna.toml" 2>>"/tmp/$host.log" & }
end() { pkill -f "/etc/$1/sterna.toml"; while pgrep -f "/etc/$1/sterna.toml"; do sleep 0.1; done; }
until_serves() { until command sterna --host "$1" store list; do sleep 0.1; done 2>/dev/null; }
HERE=unix:/run/sterna/sterna.sock
lose_each_other() {
  end rack3-a || true
  host=rack3-a begin STERNA_FAIL_POINT=after-released
  until_serves "$HERE"
  until command sterna --host "$HERE" migrate web1 --to rack3-b:fast --detach; do sleep 0.1; done
  while pgrep -f /etc/rack3-a/sterna.toml; do sleep 0.1; done
  end rack3-b
  host=rack3-a begin -u STERNA_FAIL_POINT
  until_serves "$HERE"
  until ticket=$(command sterna --host "$HERE" migration list --json | jq -er 'map(.ticket // empty)[0]'); do sleep 0.1; done
  end rack3-a
  host=rack3-b begin -u STERNA_FAIL_POINT
  until_serves "$PEER"
}
# The ticket of this migration.
ticket=
sterna() { command sterna "${@/sterna-ticket-1-…/$ticket}"; }
# What the domain above has been given back.
rm /srv/b/fast/web1.img
sterna volume create web1 --size 16MiB --store fast
export STERNA_HOST=$PEER
@HERE@
"#,
        each: Some(
            r#"
if sterna volume show web1; then
  host=rack3-a begin -u STERNA_FAIL_POINT
  until_serves "$HERE"
  until sterna migrate web1 --to rack3-a:fast; do sleep 0.1; done
fi
lose_each_other
[[ $(sterna volume show web1 --json | jq -r .state) == arriving ]]"#,
        ),
    },
];

const COME_HOME: &str = r#"
[[ $(state) == running ]] || sterna --host "$PEER" migrate web1 --to rack3-a:fast
[[ $(state) == running ]]"#;

#[test]
fn the_commands_of_the_pages_about_hosts_and_vms_do_what_they_say() -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        omission::machine_lacks("root, to boot a system that is thrown away");
        return Ok(());
    }
    let given = tempfile::tempdir()?;
    std::fs::copy(program::sterna()?, given.path().join("sterna")).context("the program under test")?;
    let root = ThrowAwayRoot::boot(given.path())?;
    root.succeed("mkdir /root/work")?;
    run(&root, HOSTS).context("two hosts")?;
    for part in &PARTS {
        run(&root, &part.commands()?).with_context(|| format!("{} {:?}", part.document, part.block))?;
    }
    Ok(())
}

fn run(root: &ThrowAwayRoot, commands: &str) -> anyhow::Result<()> {
    std::fs::write(root.path("/root/work/typed"), format!("{WORDS}{commands}"))?;
    let outcome = root.run("bash -eux -o pipefail /root/work/typed >/tmp/said 2>&1");
    if outcome.as_ref().is_ok_and(|outcome| outcome.code == 0) {
        return Ok(());
    }
    let said = root.run("tail -n 40 /tmp/said; tail -n 10 /tmp/rack3-?.log")?.stdout;
    outcome?.expect(0).context(said)
}

impl Part {
    fn commands(&self) -> anyhow::Result<String> {
        let page = std::fs::read_to_string(repository().join(self.document))?;
        let (heading, number) = self.block;
        let found = blocks(&page).into_iter().filter(|block| block.heading == heading).nth(number);
        let block =
            found.with_context(|| format!("{} has no block {number} below {heading}", self.document))?;
        ensure!(self.script.contains(HERE), "{} {heading}: its commands are not run", self.document);
        let Some(each) = self.each else { return Ok(self.script.replace(HERE, &block.commands)) };
        let each = |line: &str| {
            let command = line.split(" #").next().unwrap_or(line).trim_end();
            format!("line='{command}'\n{each}\n{line}\n")
        };
        Ok(self.script.replace(HERE, &block.commands.lines().map(each).collect::<String>()))
    }
}
