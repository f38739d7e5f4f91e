# Calls the storage as two nodes of Proxmox would, each with a daemon of its own.
#
#   ALPHA, BETA              addresses of the daemons of two hosts of these names, which are paired; each has a store `a`
#   ALPHA_RUN, BETA_RUN      folders of the sockets of their volumes

use strict;
use warnings;

use FindBin;
use Test::More;

use lib "$FindBin::Bin/lib";
require "$FindBin::Bin/../SternaPlugin.pm";

my $plugin = 'PVE::Storage::Custom::SternaPlugin';
my $nodes = "alpha=$ENV{ALPHA},beta=$ENV{BETA}";
my %on = map {
    my $name = uc($_);
    $_ => {
        'sterna-store' => 'a',
        'sterna-host' => $ENV{$name},
        'sterna-nodes' => $nodes,
        'sterna-sockets' => $ENV{"${name}_RUN"},
    }
} qw(alpha beta);

sub dies(&$$) {
    my ($code, $words, $what) = @_;
    ok(!eval { $code->(); 1 }, "$what is refused");
    like($@, $words, "$what: the reason");
}

# Writes or reads one block as QEMU would, and returns whether that worked.
sub io {
    my ($node, $disk, $command) = @_;
    my $path = $plugin->path($on{$node}, $disk, 'st');
    my $pid = fork() // die "fork: $!";
    if (!$pid) {
        open(STDOUT, '>', '/dev/null');
        exec('qemu-io', '-f', 'raw', '-c', $command, $path) or exit(1);
    }
    waitpid($pid, 0);
    return $? == 0;
}

is($plugin->api(), 12, 'the interface');
is($plugin->type(), 'sterna', 'the type');
ok((grep { $_ eq 'sterna' } @PVE::Storage::Plugin::SHARED_STORAGE), 'it counts as shared');

my ($total, $free, $used, $is_active) = $plugin->status('st', $on{alpha});
ok($total > 0 && $free <= $total && $used == $total - $free && $is_active, 'the status of a store');
dies { $plugin->status('st', { %{ $on{alpha} }, 'sterna-store' => 'none' }) } qr/no store 'none'/, 'an unknown store';

# Sizes come in KiB, and are rounded up to blocks.
my $disk = $plugin->alloc_image('st', $on{alpha}, 100, 'raw', undef, 8191);
is($disk, 'vm-100-disk-0', 'the first disk');
is($plugin->alloc_image('st', $on{alpha}, 100, 'raw', undef, 4096), 'vm-100-disk-1', 'the second one');
dies { $plugin->alloc_image('st', $on{alpha}, 101, 'raw', 'vm-100-disk-7', 4096) } qr/no disk of VM 101/, 'a name of another VM';
dies { $plugin->alloc_image('st', $on{alpha}, 100, 'qcow2', undef, 4096) } qr/not raw/, 'another format';
dies { $plugin->alloc_image('st', $on{alpha}, 100, 'raw', $disk, 4096) } qr/exists/, 'a name that is taken';
for my $name ('base-100-disk-0', '../etc/passwd', 'vm-x-disk-0', "vm-100-disk-0;true", "vm-100-disk-0\n") {
    dies { $plugin->parse_volname($name) } qr/unable to parse/, "the name '$name'";
}

is(($plugin->volume_size_info($on{beta}, 'st', $disk))[0], 8192 * 1024, 'its size, asked on another node');
my $listed = $plugin->list_images('st', $on{beta}, 100);
is_deeply([sort map { $_->{volid} } @$listed], ['st:vm-100-disk-0', 'st:vm-100-disk-1'], 'all nodes list it');
is_deeply($plugin->list_images('st', $on{alpha}, 7), [], 'another VM has none');
is(scalar @{ $plugin->list_images('st', $on{alpha}, undef, ["st:$disk"]) }, 1, 'by a list');

# On its own node, and attached on the other.
ok($plugin->activate_volume('st', $on{alpha}, $disk), 'active here');
ok(io('alpha', $disk, 'write -P 1 0 4096'), 'written here');
ok(!io('beta', $disk, 'read -P 1 0 4096'), 'not there before it is active');
ok($plugin->activate_volume('st', $on{beta}, $disk), 'active there');
ok($plugin->activate_volume('st', $on{beta}, $disk), 'and once more');
ok(io('beta', $disk, 'read -P 1 0 4096'), 'read there');
ok(io('beta', $disk, 'write -P 2 0 4096'), 'written there');
ok(io('alpha', $disk, 'read -P 2 0 4096'), 'and read here');
my $blockdev = $plugin->qemu_blockdev_options($on{beta}, 'st', $disk, '9.2', {});
is($blockdev->{driver}, 'nbd', 'QEMU gets a driver');
is($blockdev->{export}, $disk, 'an export');
is($blockdev->{server}{path}, "$ENV{BETA_RUN}/$disk.sock", 'a socket');

# The disk follows, and the other way round.
is(system('sterna', '--host', $ENV{ALPHA}, 'migrate', "volume:$disk", '--to', 'beta:a', '--json', '--detach') >> 8, 0, 'it moves');
for (1 .. 100) {
    last if eval { !defined((grep { $_->{name} eq $disk } @{ JSON::PP->new->decode(scalar `sterna --host $ENV{BETA} volume list --json`) })[0]{host}) };
    select(undef, undef, undef, 0.1);
}
ok(io('beta', $disk, 'read -P 2 0 4096'), 'it is there, with its content');

# Snapshots are of the node that has the disk, wherever they are ordered.
$plugin->volume_snapshot($on{alpha}, 'st', $disk, 'before');
ok(io('beta', $disk, 'write -P 3 0 4096'), 'written after the snapshot');
is_deeply([keys %{ $plugin->volume_snapshot_info($on{alpha}, 'st', $disk) }], ['before'], 'it is listed');
$plugin->volume_snapshot_rollback($on{alpha}, 'st', $disk, 'before');
ok(io('beta', $disk, 'read -P 2 0 4096'), 'and rolled back to');
ok($plugin->volume_has_feature($on{alpha}, 'snapshot', 'st', $disk), 'snapshots');
ok(!$plugin->volume_has_feature($on{alpha}, 'clone', 'st', $disk), 'no linked clones');
$plugin->volume_snapshot_delete($on{alpha}, 'st', $disk, 'before');
is_deeply($plugin->volume_snapshot_info($on{alpha}, 'st', $disk), {}, 'and deleted');

is($plugin->volume_resize($on{alpha}, 'st', $disk, 10 << 20, 0), 10 << 20, 'it grows');
dies { $plugin->volume_resize($on{alpha}, 'st', $disk, 12 << 20, 1) } qr/shut the VM down/, 'growth under a guest';

# A disk goes with its snapshots and its attachments.
$plugin->activate_volume('st', $on{alpha}, $disk);
$plugin->volume_snapshot($on{alpha}, 'st', $disk, 'last');
$plugin->free_image('st', $on{alpha}, $disk);
$plugin->free_image('st', $on{beta}, 'vm-100-disk-1');
is_deeply($plugin->list_images('st', $on{alpha}), [], 'nothing is left');
dies { $plugin->free_image('st', $on{alpha}, $disk) } qr/no node has/, 'a disk that is gone';

done_testing();
