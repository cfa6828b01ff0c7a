// Asks a Kestrel gRPC server about a picture: java Example ADDRESS PICTURE
import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.rpc.ErrorInfo;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Iterator;
import java.util.concurrent.TimeUnit;
import kestrel.v1.Generation.Constraint;
import kestrel.v1.Generation.RequestOptions;
import kestrel.v1.Generation.SamplingParams;
import kestrel.v1.Media.Image;
import kestrel.v1.VisionServiceGrpc;
import kestrel.v1.VisionServiceOuterClass.ChatMessage;
import kestrel.v1.VisionServiceOuterClass.ChatRole;
import kestrel.v1.VisionServiceOuterClass.CompleteChatRequest;
import kestrel.v1.VisionServiceOuterClass.DetectRequest;
import kestrel.v1.VisionServiceOuterClass.QueryRequest;
import kestrel.v1.VisionServiceOuterClass.QueryResponse;

public final class Example {
  public static void main(String[] arguments) throws Exception {
    ManagedChannel channel = ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    var vision = VisionServiceGrpc.newBlockingStub(channel).withDeadlineAfter(60, TimeUnit.SECONDS); // of all its calls
    var image = Image.newBuilder().setData(ByteString.copyFrom(Files.readAllBytes(Path.of(arguments[1])))).build();

    // A stream: pieces of the answer as they are generated, then the whole.
    var query = QueryRequest.newBuilder().setQuestion("What is in this image?").setImage(image)
        .setSampling(SamplingParams.newBuilder().setTemperature(0)).build();
    var said = ChatMessage.newBuilder().setRole(ChatRole.CHAT_ROLE_ASSISTANT);
    System.out.print("query: ");
    vision.query(query).forEachRemaining(response -> {
      System.out.print(response.getDelta().getText()); // empty for other events
      if (response.hasCompleted()) {
        System.out.printf(" (%d tokens)%n", response.getCompleted().getInfo().getUsage().getOutputTokenCount());
        said.addPartsBuilder().setText(response.getCompleted().getAnswer());
      }
    });

    // A conversation: what was asked and answered before, each message with its texts and images, and a question.
    var seen = ChatMessage.newBuilder().setRole(ChatRole.CHAT_ROLE_USER);
    seen.addPartsBuilder().setImage(image);
    seen.addPartsBuilder().setText(query.getQuestion());
    var asked = ChatMessage.newBuilder().setRole(ChatRole.CHAT_ROLE_USER);
    asked.addPartsBuilder().setText("What color is the star?");
    var chat = CompleteChatRequest.newBuilder().setSampling(query.getSampling())
        .addMessages(seen).addMessages(said).addMessages(asked).build();
    System.out.printf("chat: %s%n", vision.completeChat(chat).getResult().getAnswer());

    var detect = DetectRequest.newBuilder().setObject("shape").setImage(image).build();
    for (var object : vision.detect(detect).getObjectsList()) {
      var box = object.getBox();
      System.out.printf("detect: %.2f %.2f %.2f %.2f%n", box.getXMin(), box.getYMin(), box.getXMax(), box.getYMax());
    }

    // The details of a status say why, in words that programs can compare.
    try {
      var options = RequestOptions.newBuilder().setModel("other");
      vision.detect(detect.toBuilder().setOptions(options).build());
    } catch (StatusRuntimeException error) {
      for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
        if (detail.is(ErrorInfo.class)) {
          var reason = detail.unpack(ErrorInfo.class).getReason();
          System.out.printf("error: %s: %s%n", reason, error.getStatus().getDescription());
        }
      }
    }

    // A deadline that passes, and a cancellation: each frees what the request holds in the server.
    var longQuery = QueryRequest.newBuilder().setQuestion("?") // an answer of 900 letters
        .setConstraint(Constraint.newBuilder().setRegex("[a-z ]{900}")).build();
    try {
      vision.withDeadlineAfter(500, TimeUnit.MILLISECONDS).query(longQuery).forEachRemaining(response -> {});
    } catch (StatusRuntimeException error) {
      System.out.printf("deadline has passed: %b%n", error.getStatus().getCode() == Status.Code.DEADLINE_EXCEEDED);
    }
    try (var context = Context.current().withCancellation()) {
      Iterator<QueryResponse> answer = context.call(() -> vision.query(longQuery));
      answer.next();
      context.cancel(null);
      answer.forEachRemaining(response -> {});
    } catch (StatusRuntimeException error) {
      System.out.printf("cancelled: %b%n", error.getStatus().getCode() == Status.Code.CANCELLED);
    }
    channel.shutdown().awaitTermination(5, TimeUnit.SECONDS);
  }
}
