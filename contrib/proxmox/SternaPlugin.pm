package PVE::Storage::Custom::SternaPlugin;

# A storage of Proxmox VE whose disks are volumes of Sterna: each node has its own, and every node can use each, because a volume is
# attached where a VM needs it. So Proxmox migrates VMs as over shared storage, and the disks follow when you like.
#
#   a node's VM ──NBD, unix socket──► sterna on this node ──► its store
#                                          └── attached ──► sterna on another node ──► its store
#
# Copy this file to /usr/share/perl5/PVE/Storage/Custom/ on each node. README.md has the rest.

use strict;
use warnings;

use JSON::PP ();
use PVE::Storage;
use PVE::Storage::Plugin;

use base qw(PVE::Storage::Plugin);

# The versions of Proxmox' storage interface that this is written for: 10 (Proxmox VE 8) and later.
use constant { API_MIN => 10, API_MAX => 12 };
# How long QEMU waits for a daemon that was killed, in seconds.
use constant RECONNECT_DELAY => 60;

push @PVE::Storage::Plugin::SHARED_STORAGE, 'sterna';

sub api {
    my $theirs = PVE::Storage::APIVER();
    return $theirs if $theirs >= API_MIN && $theirs <= API_MAX;
    # A newer Proxmox says itself whether it still knows the older interface.
    return API_MAX;
}

# --- configuration

sub type { return 'sterna' }

sub plugindata {
    return {
        content => [{ images => 1, none => 1 }, { images => 1 }],
        format => [{ raw => 1 }, 'raw'],
    };
}

sub properties {
    return {
        'sterna-store' => {
            description => 'The store of Sterna that new disks are made in.',
            type => 'string',
            pattern => '[A-Za-z0-9][A-Za-z0-9._-]{0,63}',
        },
        'sterna-host' => {
            description => 'The address of the daemon on each node.',
            type => 'string',
            optional => 1,
        },
        'sterna-nodes' => {
            description => 'The daemons of all nodes: NAME=ADDRESS,... NAME is that by which the hosts are paired.',
            type => 'string',
            optional => 1,
        },
        'sterna-sockets' => {
            description => 'The folder of the sockets of volumes on each node.',
            type => 'string',
            default => '/run/sterna/volumes',
            optional => 1,
        },
    };
}

sub options {
    return {
        'sterna-store' => { fixed => 1 },
        'sterna-host' => { optional => 1 },
        'sterna-nodes' => { optional => 1 },
        'sterna-sockets' => { optional => 1 },
        nodes => { optional => 1 },
        disable => { optional => 1 },
        content => { optional => 1 },
        shared => { optional => 1 },
    };
}

# --- the daemon

# Runs a command of Sterna, and returns what it has printed, or dies with its words. No shell is used.
my sub sterna {
    my ($address, @words) = @_;
    my @command = ('sterna', defined($address) ? ('--host', $address) : (), @words, '--json');
    open(my $out, '-|', @command) or die "sterna does not start: $!\n";
    local $/ = undef;
    my $text = <$out> // '';
    close($out);
    my $failed = $?;
    my $answer = eval { JSON::PP->new->decode($text) };
    if ($failed) {
        my $said = ref($answer) eq 'HASH' ? $answer->{error}{message} : undef;
        die(($said // "sterna $words[0] $words[1] has failed") . "\n");
    }
    die "sterna $words[0] $words[1] has printed no JSON\n" if !defined($answer);
    return $answer;
}

# The daemons of other nodes, by name.
my sub nodes {
    my ($scfg) = @_;
    my %nodes;
    for my $node (split(/,/, $scfg->{'sterna-nodes'} // '')) {
        my ($name, $address) = $node =~ m/^([A-Za-z0-9][A-Za-z0-9._-]*)=(\S+)\z/
            or die "sterna-nodes: '$node' is not NAME=ADDRESS\n";
        $nodes{$name} = $address;
    }
    return \%nodes;
}

my sub here { return $_[0]->{'sterna-host'} }

my sub show {
    my ($address, $name) = @_;
    my ($found) = grep { $_->{name} eq $name } @{ sterna($address, 'volume', 'list') };
    return $found;
}

# The volume at the node that has it: that node's address, and what its daemon says of the volume.
my sub find {
    my ($scfg, $name) = @_;
    for my $address (here($scfg), sort values %{ nodes($scfg) }) {
        my $found = eval { show($address, $name) };
        warn $@ if $@;
        return ($address, $found) if $found && !defined($found->{host});
    }
    die "no node has the volume $name\n";
}

# --- names

sub parse_volname {
    my ($class, $volname) = @_;
    if ($volname =~ m/^((vm)-(\d+)-[A-Za-z0-9._-]+)\z/) {
        return ('images', $1, $3, undef, undef, undef, 'raw');
    }
    die "unable to parse the name of a volume of Sterna: '$volname'\n";
}

sub filesystem_path {
    my ($class, $scfg, $volname, $snapname) = @_;
    my ($vtype, $name, $vmid) = $class->parse_volname($volname);
    $name .= "\@$snapname" if defined($snapname);
    my $sockets = $scfg->{'sterna-sockets'} // '/run/sterna/volumes';
    my $path = "nbd+unix:///$name?socket=$sockets/$name.sock";
    return wantarray ? ($path, $vmid, $vtype) : $path;
}

sub path {
    my ($class, $scfg, $volname, $storeid, $snapname) = @_;
    return $class->filesystem_path($scfg, $volname, $snapname);
}

# Proxmox VE 9 (interface 12) asks for this instead of a path.
sub qemu_blockdev_options {
    my ($class, $scfg, $storeid, $volname, $machine_version, $options) = @_;
    my ($path) = $class->filesystem_path($scfg, $volname, $options->{'snapshot-name'});
    my ($export, $socket) = $path =~ m|^nbd\+unix:///([^?]+)\?socket=(.+)$|;
    return {
        driver => 'nbd',
        export => "$export",
        server => { type => 'unix', path => "$socket" },
        'reconnect-delay' => int(RECONNECT_DELAY),
    };
}

# --- disks

sub alloc_image {
    my ($class, $storeid, $scfg, $vmid, $format, $name, $size_kib) = @_;
    die "sterna: the format '$format' is not raw\n" if $format ne 'raw';
    $name //= $class->find_free_diskname($storeid, $scfg, $vmid, $format);
    my (undef, undef, $of) = $class->parse_volname($name);
    die "sterna: '$name' is no disk of VM $vmid\n" if $of != $vmid;
    # Volumes are of whole blocks of 4 KiB.
    my $bytes = 4096 * int(($size_kib + 3) / 4);
    sterna(here($scfg), 'volume', 'create', $name, '--store', $scfg->{'sterna-store'}, '--size', $bytes);
    return $name;
}

sub free_image {
    my ($class, $storeid, $scfg, $volname, $is_base, $format) = @_;
    my ($address, $volume) = find($scfg, $volname);
    # Snapshots go with their disk, as on every storage of Proxmox.
    for my $snapshot (@{ sterna($address, 'volume', 'snapshots', $volname) }) {
        sterna($address, 'volume', 'remove', $snapshot->{name});
    }
    for my $attachment (@{ $volume->{attachments} // [] }) {
        sterna($address, 'volume', 'detach', $volname, '--at', $attachment->{host});
    }
    sterna($address, 'volume', 'remove', $volname);
    return undef;
}

sub list_images {
    my ($class, $storeid, $scfg, $vmid, $vollist, $cache) = @_;
    my (@found, %seen);
    for my $address (here($scfg), sort values %{ nodes($scfg) }) {
        my $volumes = eval { sterna($address, 'volume', 'list') };
        # A node that is away has its disks with it.
        if (my $error = $@) { warn "$storeid: $error"; next }
        for my $volume (@$volumes) {
            my ($of) = $volume->{name} =~ m/^vm-(\d+)-[A-Za-z0-9._-]+\z/ or next;
            next if defined($volume->{host}) || $seen{ $volume->{name} }++;
            my $volid = "$storeid:$volume->{name}";
            next if $vollist ? !grep { $_ eq $volid } @$vollist : defined($vmid) && $of != $vmid;
            push @found, {
                volid => $volid,
                format => 'raw',
                size => $volume->{size_bytes},
                used => $volume->{allocated_bytes},
                vmid => $of,
                ctime => int($volume->{added_unix_ms} / 1000),
            };
        }
    }
    return \@found;
}

sub volume_size_info {
    my ($class, $scfg, $storeid, $volname, $timeout) = @_;
    my (undef, $volume) = find($scfg, $volname);
    my $size = $volume->{size_bytes};
    return wantarray ? ($size, 'raw', $volume->{allocated_bytes}, undef, int($volume->{added_unix_ms} / 1000)) : $size;
}

sub volume_resize {
    my ($class, $scfg, $storeid, $volname, $size, $running) = @_;
    # QEMU does not ask an NBD server for its size again.
    die "sterna: shut the VM down to make its disk larger\n" if $running;
    my ($address) = find($scfg, $volname);
    my $bytes = 4096 * int(($size + 4095) / 4096);
    sterna($address, 'volume', 'resize', $volname, $bytes);
    return $bytes;
}

# --- snapshots: of one instant each, also while the guest writes

sub volume_snapshot {
    my ($class, $scfg, $storeid, $volname, $snap) = @_;
    my ($address) = find($scfg, $volname);
    sterna($address, 'volume', 'snapshot', $volname, '--label', $snap);
    return undef;
}

sub volume_snapshot_rollback {
    my ($class, $scfg, $storeid, $volname, $snap) = @_;
    my ($address) = find($scfg, $volname);
    sterna($address, 'volume', 'revert', $volname, $snap);
    return undef;
}

sub volume_rollback_is_possible { return 1 }

sub volume_snapshot_delete {
    my ($class, $scfg, $storeid, $volname, $snap, $running) = @_;
    my ($address) = find($scfg, $volname);
    sterna($address, 'volume', 'remove', "$volname\@$snap");
    return undef;
}

sub volume_snapshot_info {
    my ($class, $scfg, $storeid, $volname) = @_;
    my ($address) = find($scfg, $volname);
    my %info;
    for my $snapshot (@{ sterna($address, 'volume', 'snapshots', $volname) }) {
        my $of = $snapshot->{snapshot_of};
        $info{ $of->{label} } = { id => $snapshot->{id}, timestamp => int($of->{taken_unix_ms} / 1000) };
    }
    return \%info;
}

sub volume_qemu_snapshot_method { return 'storage' }

sub volume_has_feature {
    my ($class, $scfg, $feature, $storeid, $volname, $snapname, $running) = @_;
    my $of = defined($snapname) ? 'snap' : 'current';
    my $features = {
        copy => { current => 1, snap => 1 },
        snapshot => { current => 1, snap => 1 },
        sparseinit => { current => 1 },
    };
    return $features->{$feature}{$of} ? 1 : undef;
}

sub create_base { die "sterna: a disk cannot become a template; clone it in full\n" }

sub clone_image { die "sterna: a linked clone is not possible; clone it in full\n" }

# Proxmox copies disks to and from other storages by their paths.
sub volume_export_formats { return () }
sub volume_import_formats { return () }

# --- activation

sub status {
    my ($class, $storeid, $scfg, $cache) = @_;
    my ($store) = grep { $_->{name} eq $scfg->{'sterna-store'} } @{ sterna(here($scfg), 'store', 'list') };
    die "$storeid: sterna on this node has no store '$scfg->{'sterna-store'}'\n" if !$store;
    return (0, 0, 0, 0) if defined($store->{problem});
    my ($total, $free) = ($store->{bytes_total}, $store->{bytes_free});
    return ($total, $free, $total - $free, 1);
}

sub activate_storage {
    my ($class, $storeid, $scfg, $cache) = @_;
    $class->status($storeid, $scfg, $cache);
    return 1;
}

sub deactivate_storage { return 1 }

# Makes a disk usable on this node: it is here, or it is attached here. It stays attached until the disk is here or is removed, because
# a VM that comes and goes would have to wait each time.
sub activate_volume {
    my ($class, $storeid, $scfg, $volname, $snapname, $cache) = @_;
    my $name = defined($snapname) ? "$volname\@$snapname" : $volname;
    my $known = show(here($scfg), $name);
    return 1 if $known && (!defined($known->{host}) || defined($known->{attached_by}));
    my $own = sterna(here($scfg), 'host', 'show')->{name} // '';
    my ($address) = find($scfg, $name);
    sterna($address, 'volume', 'attach', $name, '--at', $own, defined($snapname) ? '--read-only' : ());
    return 1;
}

sub deactivate_volume { return 1 }

1;
